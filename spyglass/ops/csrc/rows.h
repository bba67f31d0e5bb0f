// What linear maps and experts share: activations on their way into a product, sums on their way out.
#pragma once
#include "product.h"
#include "quantise.h"

enum Dtype { FLOAT32, BFLOAT16 };

// Rows of activations: row t starts at x + t * stride elements.
struct Rows {
  const void* x;
  i64 stride;
  int dtype;
};

// Row `index` as words of M, rounded as `q` says, zero behind the last channel. Pairs take bf16 rows, and fp32 rows whose
// rounding leaves e4m3 or e2m1 values times a power of two: those fit bf16 exactly.
template <class M> inline void prepare_row(const Rows& rows, i64 index, i64 cols, i64 words, const Quant& q, u32* out) {
  typedef typename M::Element E;
  E* y = (E*)out;
  auto fill = [&](auto x) {
    if (q.element) return quantise_row(x, y, cols, q);
    if (sizeof(*x) == sizeof(E)) {
      memcpy((void*)y, x, cols * sizeof(E));
      return;
    }
    vectors(cols, [&](i64 i, auto left) { store_n(y + i, load_n(x + i, left), left); });
  };
  i64 start = index * rows.stride;
  rows.dtype == FLOAT32 ? fill((const float*)rows.x + start) : fill((const bf16*)rows.x + start);
  memset((void*)(y + cols), 0, words * 4 - cols * sizeof(E));
}

// Whether a product may run on pairs of bf16: the hardware can, and both operands are bf16 numbers.
inline bool fits_pairs(const Weight& w, int x_dtype, const Quant& q) {
  bool x_fits = x_dtype == BFLOAT16 || (q.element && !q.e4m3_scale);
  return SG_PAIRS && x_fits && w.format != F32 && w.scale_kind != SCALE_F32;
}

// Calls run(M(), format) with the words and the weight format as compile-time values.
template <class Run> inline void with_format(const Weight& w, bool pairs, Run run) {
#if SG_PAIRS
  if (pairs) {
    if (w.format == BF16) return run(Pairs(), SIZE(BF16));
    if (w.format == FP8) return run(Pairs(), SIZE(FP8));
    return run(Pairs(), SIZE(FP4));
  }
#endif
  if (w.format == F32) return run(Floats(), SIZE(F32));
  if (w.format == BF16) return run(Floats(), SIZE(BF16));
  if (w.format == FP8) return run(Floats(), SIZE(FP8));
  return run(Floats(), SIZE(FP4));
}

// The largest of the sums of each row of x, and where: the first of equals, a NaN before all numbers. Every thread keeps
// those that it has met, and meets rows of the weight in order; `skip` (per row of the weight) leaves some out.
struct Largest {
  const u8* skip;
  i64 width;      // rows of x, rounded up to whole vectors
  float* values;  // [threads][width]
  float* places;  // the same; exact up to 2^24 rows of the weight
  void begin(int threads) {
    for (i64 i = 0; i < threads * width; i++) values[i] = -__builtin_inff(), places[i] = 0;
  }
  static INLINE VI beats(V value, V best) { return (value > best) | ((value != value) & (best == best)); }
  void take(i64 t, i64 row, float value) {
    i64 at = omp_get_thread_num() * width + t;
    if (skip[row] || !beats(splat(value), splat(values[at]))[0]) return;
    values[at] = value, places[at] = row;
  }
  // Sums [n weight rows][count vectors of x rows] from row `first` of the weight on, x rows from `t` on.
  void take_lanes(i64 t, const V* c, i64 n, int count, i64 first) {
    for (int j = 0; j < count; j++) {
      i64 at = omp_get_thread_num() * width + t + j * VL;
      V best = load<V>(values + at), place = load<V>(places + at);
      VI below = best == best;  // most stretches hold nothing larger
      for (i64 r = 0; r < n; r++) below &= c[r * count + j] <= best;
      if (!some(~below)) continue;
      for (i64 r = 0; r < n; r++) {
        if (skip[first + r]) continue;
        VI better = beats(c[r * count + j], best);
        best = better ? c[r * count + j] : best, place = better ? splat(first + r) : place;
      }
      store(values + at, best), store(places + at, place);
    }
  }
};

// What happens to the fp32 sums on their way out: + bias[o] + addend[t][o], one rounding. Or only the largest are kept.
struct Output {
  void* out;
  i64 stride;
  int dtype;
  const float* addend;
  const float* bias;
  bool past_caches = false;  // more than they hold
  Largest* largest = nullptr;
  template <class T> void put_block(T* to, i64 row, i64 first, i64 n, V value) const {
    if (bias) value += load_n(bias + first, n);
    if (addend) value += load_n(addend + row * stride + first, n);
    if constexpr (sizeof(T) == 4)
      if (past_caches && n >= VL) return store_past(to + row * stride + first, value);
    store_n(to + row * stride + first, value, n);
  }
  void put_vector(i64 row, i64 first, i64 n, V value) const {
    if (dtype == FLOAT32) put_block((float*)out, row, first, n, value);
    else put_block((bf16*)out, row, first, n, value);
  }
  void put_one(i64 row, i64 at, float value) const {
    if (bias) value += bias[at];
    if (addend) value += addend[row * stride + at];
    if (dtype == FLOAT32) ((float*)out)[row * stride + at] = value;
    else ((bf16*)out)[row * stride + at] = narrow1(value);
  }
};

constexpr i64 FEW = 8;  // up to this many rows the weight is streamed, above it is decoded into `Rows`

// Calls run(T) for the smallest supported number of rows that holds n.
template <class Run> inline void with_few(i64 n, Run run) {
  if (n <= 1) run(SIZE(1));
  else if (n == 2) run(SIZE(2));
  else if (n <= 4) run(SIZE(4));
  else run(SIZE(8));
}

inline int count_of(i64 n) { return n >= MAX_LANES ? MAX_COUNT : (n + VL - 1) / VL; }

// Sums [n weight rows][count vectors of x rows] to out[x row][first ..].
inline void turn_out(const V* c, i64 n, int count, i64 first_row, i64 num_rows, i64 first, const Output& out) {
  for (int j = 0; j < count; j++)
    for (i64 r = 0; r < n; r += 2 * VL) {  // two blocks side by side, so that a cache line of the output is filled at once
      VU v[2][VL];
      for (int half = 0; half < 2; half++) {
        for (int i = 0; i < VL; i++) v[half][i] = (VU)c[(r + half * VL + i) * count + j];
        transpose(v[half]);
      }
      for (int i = 0; i < VL && j * VL + i < num_rows; i++) {
        out.put_vector(first_row + j * VL + i, first + r, n - r, (V)v[0][i]);
        if (r + VL < n) out.put_vector(first_row + j * VL + i, first + r + VL, n - r - VL, (V)v[1][i]);
      }
    }
}

// x in lanes, `num` rows in panels of at most MAX_LANES rows; panel p starts at p * MAX_LANES * words.
template <class M, int F>
inline void pack_panel(const Rows& x, const i64* index, i64 first, i64 num, i64 cols, i64 words, const Quant& q, u32* out) {
  SCRATCH(prepared);
  u32* rows = prepared.get<u32>(MAX_LANES * words);
  const u32* at[MAX_LANES];
  for (i64 i = 0; i < num; i++) {
    at[i] = rows + i * words;
    prepare_row<M>(x, index ? index[first + i] : first + i, cols, words, q, rows + i * words);
  }
  pack_lanes(at, num, words, out, count_of(num));
  spread<M, F>(out, words, count_of(num));
}

// `linear.cpp`: x [T, groups, cols] times the weight, whose row block g reads group g.
void linear(const Weight& w, Rows x, i64 T, i64 groups, const Quant& q, Output out, int threads);
