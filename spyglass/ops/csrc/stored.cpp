// Rows into pages that hold codes.
#include "stored.h"

// Rows x [T, D], before rounding, to their places in pages of this format; a negative place is none.
extern "C" void sg_store_rows(void* pages, i64 format, const void* x, int dtype, i64 T, i64 D, const i64* write, int threads) {
  const RowForm form(format, D);
  parallel(T < 8 ? 1 : threads, T, [&](i64 t) {
    if (write[t] < 0) return;
    u8* row = (u8*)pages + write[t] * form.bytes;
    if (dtype == 0) encode_row((const float*)x + t * D, form, row);
    else encode_row((const bf16*)x + t * D, form, row);
  });
}

ON_TAPE(sg_store_rows)
