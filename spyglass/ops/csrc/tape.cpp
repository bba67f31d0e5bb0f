// Many kernel calls as one.
#include "simd.h"

// `calls` times: address of an ON_TAPE function, how many words follow, and these.
extern "C" void sg_replay(const u64* tape, i64 calls) {
  for (; calls > 0; calls--, tape += 2 + tape[1]) ((void (*)(const u64*))tape[0])(tape + 2);
}

// One call, in the form of a function that a GPU's driver calls (cuLaunchHostFunc).
extern "C" void sg_replay_one(void* tape) { sg_replay((const u64*)tape, 1); }
