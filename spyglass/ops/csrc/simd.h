// Vectors of VL 4-byte lanes in the compiler's own vector language, so that one text serves every instruction set:
// 16 lanes with AVX-512, 8 with AVX2, 4 elsewhere (SSE2, NEON). Intrinsics appear only where that language cannot say
// what the hardware can: bf16 dot products, table look-ups by byte, rounding to bf16.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <omp.h>
#include <type_traits>
#include <utility>
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int VL = 16;
#elif defined(__AVX2__)
constexpr int VL = 8;
#else
constexpr int VL = 4;
#endif
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define SG_PAIRS 1  // dot products of bf16 pairs with fp32 accumulation
#else
#define SG_PAIRS 0
#endif
#if SG_PAIRS && defined(__AMX_BF16__)
#define SG_TILES 1  // the same on tiles of 16 x 32 of them
#else
#define SG_TILES 0
#endif

typedef uint8_t u8;
typedef uint16_t bf16;  // the upper half of an fp32
typedef uint32_t u32;
typedef int32_t i32;
typedef int64_t i64;
typedef uint64_t u64;
typedef float V __attribute__((vector_size(4 * VL)));
typedef u32 VU __attribute__((vector_size(4 * VL)));
typedef i32 VI __attribute__((vector_size(4 * VL)));
typedef bf16 VH __attribute__((vector_size(2 * VL)));
typedef u8 VB __attribute__((vector_size(VL)));
#define INLINE inline __attribute__((always_inline))

template <class X, class P> INLINE X load(const P* p) {
  X v;
  memcpy(&v, p, sizeof(X));
  return v;
}
template <class X, class P> INLINE void store(P* p, X v) { memcpy(p, &v, sizeof(X)); }
INLINE V splat(float x) { return V{} + x; }
INLINE VU splat_bits(u32 x) { return VU{} + x; }

// Zero-extension; the compiler's own conversion goes through half vectors.
#if defined(__AVX512F__)
INLINE VU extend(VH h) { return (VU)_mm512_cvtepu16_epi32((__m256i)h); }
INLINE VU extend(VB b) { return (VU)_mm512_cvtepu8_epi32((__m128i)b); }
#elif defined(__AVX2__)
INLINE VU extend(VH h) { return (VU)_mm256_cvtepu16_epi32((__m128i)h); }
INLINE VU extend(VB b) { return __builtin_convertvector(b, VU); }
#else
INLINE VU extend(VH h) { return __builtin_convertvector(h, VU); }
INLINE VU extend(VB b) { return __builtin_convertvector(b, VU); }
#endif
INLINE V widen(VH h) { return (V)(extend(h) << 16); }
INLINE VH narrow(V v) {  // nearest, ties to even; NaN stays NaN
#if SG_PAIRS
  return (VH)_mm512_cvtneps_pbh((__m512)v);
#else
  VU u = (VU)v;
  VU rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  return __builtin_convertvector((VU)(v == v ? (VI)rounded : (VI)splat_bits(0x7fc0)), VH);
#endif
}
INLINE float widen1(bf16 h) {
  u32 u = (u32)h << 16;
  return load<float>(&u);
}
INLINE bf16 narrow1(float x) {
  u32 u = load<u32>(&x);
  return x == x ? (bf16)((u + 0x7fff + ((u >> 16) & 1)) >> 16) : (bf16)0x7fc0;
}
INLINE float round_bf16(float x) { return widen1(narrow1(x)); }
INLINE V round_bf16(V v) { return widen(narrow(v)); }

// Loads and stores of activations in either dtype; the counted forms touch only n < VL elements.
INLINE V load_v(const float* p) { return load<V>(p); }
INLINE V load_v(const bf16* p) { return widen(load<VH>(p)); }
INLINE void store_v(float* p, V v) { store(p, v); }
INLINE void store_v(bf16* p, V v) { store(p, narrow(v)); }
// To memory that no cache need hold: lines are not read first, to be written over. Before others may read, `settle`.
INLINE void store_past(float* p, V v) {
#if defined(__AVX512F__)
  if ((uintptr_t)p % 64 == 0) return _mm512_stream_ps(p, (__m512)v);
#elif defined(__AVX2__)
  if ((uintptr_t)p % 32 == 0) return _mm256_stream_ps(p, (__m256)v);
#endif
  store(p, v);
}
INLINE void settle() {
#if defined(__AVX512F__) || defined(__AVX2__)
  _mm_sfence();
#endif
}
template <class T> INLINE V load_n(const T* p, i64 n) {
  if (n >= VL) return load_v(p);
  T part[VL] = {};
  for (i64 i = 0; i < n; i++) part[i] = p[i];
  return load_v(part);
}
template <class T> INLINE void store_n(T* p, V v, i64 n) {
  if (n >= VL) return store_v(p, v);
  T part[VL];
  store_v(part, v);
  for (i64 i = 0; i < n; i++) p[i] = part[i];
}
// body(i, left) for i = 0, VL, ... below n; `left` elements remain, and the whole vectors know that at compile time.
template <class F> INLINE void vectors(i64 n, F body) {
  i64 i = 0;
  for (; i + VL <= n; i += VL) body(i, std::integral_constant<i64, VL>());
  if (i < n) body(i, n - i);
}
INLINE float get(float x) { return x; }
INLINE float get(bf16 x) { return widen1(x); }
INLINE void put(float* p, float x) { *p = x; }
INLINE void put(bf16* p, float x) { *p = narrow1(x); }

// Declares VI `name` with a constant expression of `lane` in each lane. Filled in by a loop, the compiler would build it
// lane by lane every time.
#define LANES(name, expression)                                        \
  struct name##Table {                                                 \
    alignas(4 * VL) i32 at[VL];                                        \
    constexpr name##Table() : at() {                                   \
      for (int lane = 0; lane < VL; lane++) at[lane] = (expression);   \
    }                                                                  \
  };                                                                   \
  static constexpr name##Table name##Constant;                         \
  const VI name = load<VI>(name##Constant.at)

#if defined(__AVX512F__)
INLINE V vmax(V a, V b) { return (V)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE V vmin(V a, V b) { return (V)_mm512_min_ps((__m512)a, (__m512)b); }
#else
INLINE V vmax(V a, V b) { return a > b ? a : b; }
INLINE V vmin(V a, V b) { return a < b ? a : b; }
#endif
INLINE V vabs(V a) { return (V)((VU)a & 0x7fffffffu); }
// Neighbouring lanes of a, then of b, added pairwise within every four lanes: a0+a1 a2+a3 b0+b1 b2+b3.
INLINE V add_pairs(V a, V b) {
  LANES(even, (lane & ~3) + 2 * (lane & 1) + (lane & 2 ? VL : 0));
  LANES(odd, (lane & ~3) + 2 * (lane & 1) + (lane & 2 ? VL : 0) + 1);
  return __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, odd);
}
template <int distance> INLINE V partner(V v) {  // lane i <-> lane i ^ distance
  LANES(other, lane ^ distance);
  return __builtin_shuffle(v, other);
}
// The sums of four vectors, in the first four lanes.
INLINE V sum_four(V a, V b, V c, V d) {
  V v = add_pairs(add_pairs(a, b), add_pairs(c, d));
  if constexpr (VL > 8) v += partner<8>(v);
  if constexpr (VL > 4) v += partner<4>(v);
  return v;
}
INLINE float sum(V v) { return sum_four(v, V{}, V{}, V{})[0]; }
INLINE V top(V v) {  // the largest lane, in all lanes
  if constexpr (VL > 8) v = vmax(v, partner<8>(v));
  if constexpr (VL > 4) v = vmax(v, partner<4>(v));
  v = vmax(v, partner<2>(v));
  return vmax(v, partner<1>(v));
}
INLINE bool some(VI mask) { return top((V)(mask & 0x3f800000))[0] != 0; }  // any lane of -1

// e^x to about 1 ulp: x = n ln2 + r, a polynomial for e^r, n into the exponent. Below -87 the result is 0.
INLINE V vexp(V x) {
  V y = vmin(x, splat(88.0f));
  V n = (y * 1.44269504f + 12582912.0f) - 12582912.0f;
  V r = (y - n * 0.693359375f) + n * 2.12194440e-4f;
  V p = splat(1.9875691e-4f);
  p = p * r + 1.3981999e-3f;
  p = p * r + 8.3334519e-3f;
  p = p * r + 4.1665796e-2f;
  p = p * r + 1.6666666e-1f;
  p = p * r + 5.0000001e-1f;
  p = p * r * r + r + 1.0f;
  V power = (V)((__builtin_convertvector(n, VI) + 127) << 23);
  return x < -87.0f ? V{} : (x == x ? p * power : x);
}
INLINE V vsigmoid(V x) { return 1.0f / (1.0f + vexp(-x)); }

// One of `threads` workers taking numbered tasks, in order, as they become free.
template <class F> static void parallel(int threads, i64 tasks, F task) {
  if (threads <= 1 || tasks <= 1) {
    for (i64 i = 0; i < tasks; i++) task(i);
    return;
  }
#pragma omp parallel for schedule(monotonic : dynamic, 1) num_threads(threads)
  for (i64 i = 0; i < tasks; i++) task(i);
}

// A share of one piece of work: several threads walk it together, or one alone (size 1).
struct Part {
  int rank, size;
  void barrier() const {
    if (size > 1) {
#pragma omp barrier
    }
  }
};
template <class F> static void together(int threads, F work) {
  if (threads <= 1) return work(Part{0, 1});
#pragma omp parallel num_threads(threads)
  work(Part{omp_get_thread_num(), omp_get_num_threads()});
}

// Scratch memory of one thread and one purpose. It only grows and is kept, because fresh pages cost more than the work
// of a small call; its size follows the largest call (a few MB per thread).
struct Scratch {
  char* memory = nullptr;
  size_t size = 0;
  ~Scratch() { free(memory); }
  template <class T> T* get(size_t count) {
    size_t bytes = (count * sizeof(T) + 4096) / 4096 * 4096;
    if (bytes > size) {
      free(memory);
      memory = (char*)aligned_alloc(4096, bytes);
      size = bytes;
    }
    return (T*)memory;
  }
};
#define SCRATCH(name) static thread_local Scratch name

// v[i][j] <-> v[j][i]: log2(VL) rounds of exchanging halves.
template <int half> INLINE void transpose_round(VU* v) {
  LANES(low, lane & half ? VL + lane - half : lane);
  LANES(high, lane & half ? VL + lane : lane + half);
#pragma GCC unroll 16
  for (int i = 0; i < VL; i++) {
    if (i & half) continue;
    VU a = v[i], b = v[i + half];
    v[i] = __builtin_shuffle(a, b, low);
    v[i + half] = __builtin_shuffle(a, b, high);
  }
}
INLINE void transpose(VU* v) {
  if constexpr (VL > 8) transpose_round<8>(v);
  if constexpr (VL > 4) transpose_round<4>(v);
  transpose_round<2>(v);
  transpose_round<1>(v);
}

// A kernel whose arguments are 64-bit words, as they stand on a tape (`tape.cpp`): what it takes lies in the low bytes.
template <class X> INLINE X of_word(u64 word) { return load<X>(&word); }
template <class... A, size_t... I> INLINE void call(void (*kernel)(A...), const u64* words, std::index_sequence<I...>) {
  kernel(of_word<A>(words[I])...);
}
template <class... A> INLINE void call(void (*kernel)(A...), const u64* words) { call(kernel, words, std::index_sequence_for<A...>()); }
#define ON_TAPE(kernel) \
  extern "C" void kernel##_on_tape(const u64* words) { call(kernel, words); }
