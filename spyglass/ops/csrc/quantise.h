// The model's own rounding of activations (spec v4 2.5): quantise and dequantise in blocks along a row.
#pragma once
#include "simd.h"

enum Element { NONE, E4M3, E2M1 };
struct Quant {
  int element, block, e4m3_scale;  // e4m3_scale: the scale is an e4m3 number instead of a power of two
  int to_bf16 = 0;  // results are bf16 numbers; with power-of-two scales they are anyway
  float top() const { return element == E4M3 ? 448.0f : 6.0f; }
  float floor() const { return e4m3_scale ? 6 * 0x1p-9f : element == E4M3 ? 1e-4f : 6 * 0x1p-126f; }
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

// Scale of a block whose largest magnitude is `amax`, lane by lane.
INLINE V block_scale(V amax, const Quant& q) {
  V bounded = amax < q.floor() ? splat(q.floor()) : amax;
  if (q.e4m3_scale) return round_e4m3(vmin(bounded / 6.0f, splat(448.0f)));
  VU bits = (VU)(bounded * (1.0f / q.top()));
  return (V)(((bits >> 23) - (VU)((VI)(bits & 0x7fffff) != 0)) << 23);  // a true comparison is -1
}
INLINE V quantise(V x, V scale, const Quant& q) {
  // dividing by a power of two is multiplying by the one with the opposite exponent
  V code = q.e4m3_scale ? x / scale : x * (V)(splat_bits(254u << 23) - (VU)scale);
  code = code > q.top() ? splat(q.top()) : code < -q.top() ? splat(-q.top()) : code;
  V value = (q.element == E4M3 ? round_e4m3(code) : round_e2m1(code)) * scale;
  return q.to_bf16 ? round_bf16(value) : value;
}

// y = round(x) over n channels in blocks, the last one possibly shorter.
template <class In, class Out> static void quantise_row(const In* x, Out* y, i64 n, const Quant& q) {
  for (i64 first = 0; first < n; first += q.block) {
    i64 count = n - first < q.block ? n - first : q.block;
    V amax = {};
    for (i64 i = 0; i < count; i += VL) amax = vmax(vabs(load_n(x + first + i, count - i)), amax);
    V scale = block_scale(splat(top(amax)), q);
    for (i64 i = 0; i < count; i += VL)
      store_n(y + first + i, quantise(load_n(x + first + i, count - i), scale, q), count - i);
  }
}
