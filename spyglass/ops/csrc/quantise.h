// The model's own rounding of activations (spec v4 2.5): quantise and dequantise in blocks along a row.
#pragma once
#include "simd.h"

enum Element { NONE, E4M3, E2M1 };
struct Quant {
  int element, block, e4m3_scale;  // e4m3_scale: the scale is an e4m3 number instead of a power of two
  int to_bf16 = 0;  // results are bf16 numbers; with power-of-two scales they are anyway
};

// To the nearest multiple of 2^(23 - n) by adding and subtracting 1.5 * 2^n; ties to even.
INLINE V to_multiple(V x, float magic) { return (x + magic) - magic; }
INLINE V with_sign(V size, V sign) { return (V)((VU)size | ((VU)sign & 0x80000000u)); }
INLINE V round_e4m3(V x) {  // |x| <= 448 or NaN: three fraction bits, steps of 2^-9 below 2^-6
  VU u = (VU)vabs(x);
  V normal = (V)((u + 0x7ffff + ((u >> 20) & 1)) & ~0xfffffu);
  return with_sign((V)u < 0x1p-6f ? to_multiple((V)u, 0x1.8p14f) : normal, x);
}
INLINE V round_e2m1(V x) {  // |x| <= 6: steps of 0.5 below 2, 1 below 4, 2 above
  V a = vabs(x);
  V low = a < 2.0f ? to_multiple(a, 0x1.8p22f) : to_multiple(a, 0x1.8p23f);
  return with_sign(a < 4.0f ? low : to_multiple(a, 0x1.8p24f), x);
}

// One way of rounding, known at compile time. Blocks of one scale are handled lane by lane.
template <int element, int e4m3_scale> struct Rounding {
  static constexpr float TOP = element == E4M3 ? 448.0f : 6.0f;
  static constexpr float FLOOR = e4m3_scale ? 6 * 0x1p-9f : element == E4M3 ? 1e-4f : 6 * 0x1p-126f;
  static INLINE V scale(V amax) {
    V bounded = amax < FLOOR ? splat(FLOOR) : amax;
    if (e4m3_scale) return round_e4m3(vmin(bounded / 6.0f, splat(448.0f)));
    VU bits = (VU)(bounded * (1.0f / TOP));
    return (V)(((bits >> 23) - (VU)((VI)(bits & 0x7fffff) != 0)) << 23);  // a true comparison is -1
  }
  // Dividing by a power of two is multiplying by the one with the opposite exponent.
  static INLINE V inverse(V scale) { return e4m3_scale ? scale : (V)(splat_bits(254u << 23) - (VU)scale); }
  static INLINE V round(V x, V scale, V inverse, int to_bf16) {
    V code = e4m3_scale ? x / scale : x * inverse;
    code = code > TOP ? splat(TOP) : code < -TOP ? splat(-TOP) : code;
    V value = (element == E4M3 ? round_e4m3(code) : round_e2m1(code)) * scale;
    return to_bf16 ? round_bf16(value) : value;
  }
};

// run(Rounding) for the way that q asks for.
template <class Run> INLINE void with_rounding(const Quant& q, Run run) {
  if (q.element == E4M3) q.e4m3_scale ? run(Rounding<E4M3, 1>()) : run(Rounding<E4M3, 0>());
  else q.e4m3_scale ? run(Rounding<E2M1, 1>()) : run(Rounding<E2M1, 0>());
}

// y = round(x) over n channels in blocks, the last one possibly shorter.
template <class In, class Out> inline void quantise_row(const In* x, Out* y, i64 n, const Quant& q) {
  with_rounding(q, [&](auto rounding) {
    typedef decltype(rounding) R;
    const i64 block = q.block;
    const int to_bf16 = q.to_bf16;
    for (i64 first = 0; first < n; first += block) {
      i64 count = n - first < block ? n - first : block;
      V amax = {};
      vectors(count, [&](i64 i, auto left) { amax = vmax(vabs(load_n(x + first + i, left)), amax); });
      V scale = R::scale(top(amax)), inverse = R::inverse(scale);
      vectors(count, [&](i64 i, auto left) {
        store_n(y + first + i, R::round(load_n(x + first + i, left), scale, inverse, to_bf16), left);
      });
    }
  });
}
