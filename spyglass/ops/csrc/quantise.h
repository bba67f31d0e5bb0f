// The model's own rounding of activations (spec v4 2.5): quantise and dequantise in blocks along a row.
#pragma once
#include "simd.h"

enum Element { NONE, E4M3, E2M1 };
struct Quant {
  int element, block, e4m3_scale;  // e4m3_scale: the scale is an e4m3 number instead of a power of two
  int to_bf16 = 0;  // results are bf16 numbers; with power-of-two scales they are anyway
};

INLINE V with_sign(V size, V sign) { return (V)((VU)size | ((VU)sign & 0x80000000u)); }

// x to the grid of a small float format: `fraction` bits after the leading one, but no finer than at `low`, the smallest
// power of two with that many. Adding and subtracting 1.5 * 2^23 grid steps rounds to nearest, ties to even; |x| < 2^100.
template <int fraction> INLINE V to_grid(V x, V low) {
  V power = vmax((V)((VU)x & 0x7f800000u), low);
  V magic = (V)((VU)power + ((23 - fraction) << 23 | 0x400000));
  return with_sign((x + magic) - magic, x);
}

// One way of rounding, known at compile time. Blocks are handled lane by lane; `Grid` is what a block's scale comes to.
template <int element, int e4m3_scale> struct Rounding {
  static constexpr float TOP = element == E4M3 ? 448.0f : 6.0f, LOW = element == E4M3 ? 0x1p-6f : 1.0f;
  static constexpr float FLOOR = e4m3_scale ? 6 * 0x1p-9f : element == E4M3 ? 1e-4f : 6 * 0x1p-126f;
  static constexpr int FRACTION = element == E4M3 ? 3 : 1;
  struct Grid {
    V top, low, scale;
  };
  static INLINE V scale(V amax) {
    V bounded = amax < FLOOR ? splat(FLOOR) : amax;
    if (e4m3_scale) return to_grid<3>(vmin(bounded / 6.0f, splat(448.0f)), splat(0x1p-6f));
    VU bits = (VU)(bounded * (1.0f / TOP));
    return (V)(((bits >> 23) - (VU)((VI)(bits & 0x7fffff) != 0)) << 23);  // a true comparison is -1
  }
  static INLINE Grid grid(V scale) { return e4m3_scale ? Grid{splat(TOP), splat(LOW), scale} : Grid{scale * TOP, scale * LOW, scale}; }
  static INLINE V round(V x, const Grid& g, int to_bf16) {
    if (e4m3_scale) x = x / g.scale;  // by a power of two nothing need be divided: the grid is scaled instead
    V value = to_grid<FRACTION>(vmin(g.top, vmax(-g.top, x)), g.low);  // NaN stays NaN
    if (e4m3_scale) value *= g.scale;
    return to_bf16 ? round_bf16(value) : value;
  }
};

// run(Rounding) for the way that q asks for.
template <class Run> INLINE void with_rounding(const Quant& q, Run run) {
  if (q.element == E4M3) q.e4m3_scale ? run(Rounding<E4M3, 1>()) : run(Rounding<E4M3, 0>());
  else q.e4m3_scale ? run(Rounding<E2M1, 1>()) : run(Rounding<E2M1, 0>());
}

// y = round(x) over n channels in blocks, the last one possibly shorter. The scales of many blocks are found first, so that
// no block waits for its own.
template <class In, class Out> inline void quantise_row(const In* x, Out* y, i64 n, const Quant& q) {
  with_rounding(q, [&](auto rounding) {
    typedef decltype(rounding) R;
    constexpr i64 BLOCKS = 4 * VL;
    const i64 block = q.block;
    const int to_bf16 = q.to_bf16;
    float scales[BLOCKS] = {};
    for (i64 start = 0; start < n; start += BLOCKS * block) {
      i64 blocks = (n - start + block - 1) / block < BLOCKS ? (n - start + block - 1) / block : BLOCKS;
      auto count = [&](i64 b) { return n - start - b * block < block ? n - start - b * block : block; };
      for (i64 b = 0; b < blocks; b++) {
        const In* from = x + start + b * block;
        V amax = {};
        vectors(count(b), [&](i64 i, auto left) { amax = vmax(vabs(load_n(from + i, left)), amax); });
        scales[b] = top(amax)[0];
      }
      for (i64 b = 0; b < blocks; b += VL) store_v(scales + b, R::scale(load_v(scales + b)));
      for (i64 b = 0; b < blocks; b++) {
        const typename R::Grid grid = R::grid(splat(scales[b]));
        const In* from = x + start + b * block;
        Out* to = y + start + b * block;
        vectors(count(b), [&](i64 i, auto left) { store_n(to + i, R::round(load_n(from + i, left), grid, to_bf16), left); });
      }
    }
  });
}
