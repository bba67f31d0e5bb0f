// Low-rank addends of adapters: rank rows a [R, in] and b [R, out], fp32 or bf16, with a factor each.
#pragma once
#include "simd.h"

template <class A, class X> INLINE float dot_n(const A* a, const X* x, i64 n) {
  V total = {};
  vectors(n, [&](i64 i, auto left) { total += load_n(a + i, left) * load_n(x + i, left); });
  return sum(total);
}

// out[0 .. n) += u * b[0 .. n)
template <class B> INLINE void add_n(float u, const B* b, i64 n, float* out) {
  vectors(n, [&](i64 i, auto left) { store_n(out + i, load_n(out + i, left) + u * load_n(b + i, left), left); });
}

// The rank rows that all adapters have beside one matrix of every expert. Those of adapter `at` and expert e are rows
// start[at * (E + 1) + e] .. start[at * (E + 1) + e + 1].
struct Ranks {
  const void *a, *b;
  const float* scale;
  const i32* start;
  i64 in, out;
};

// `adapter` of each row of x; the adapter of adapter_ids[at] is the one numbered `at`.
struct Adapters {
  const i32 *adapter, *adapter_ids;
  i64 count, E;
  int bf16_ranks;
  Ranks w1, w3, w2;
  // Number of the adapter of row t, -1 for none.
  i64 of(i64 t) const {
    if (!adapter) return -1;
    for (i64 at = 0; at < count; at++)
      if (adapter_ids[at] == adapter[t]) return at;
    return -1;
  }
  i64 first(const Ranks& m, i64 at, i64 e) const { return m.start ? m.start[at * (E + 1) + e] : 0; }
  i64 rank(const Ranks& m, i64 at, i64 e) const { return m.start ? m.start[at * (E + 1) + e + 1] - m.start[at * (E + 1) + e] : 0; }
  // u[r] = scale_r * (a_r . x)
  template <class X> void reduce(const Ranks& m, i64 at, i64 e, const X* x, float* u) const {
    i64 first_row = first(m, at, e), n = rank(m, at, e);
    for (i64 r = 0; r < n; r++) {
      i64 row = first_row + r;
      float dot = bf16_ranks ? dot_n((const bf16*)m.a + row * m.in, x, m.in) : dot_n((const float*)m.a + row * m.in, x, m.in);
      u[r] = dot * m.scale[row];
    }
  }
  // out[0 .. n) += sum_r u[r] * b_r[from .. from + n)
  void add(const Ranks& m, i64 at, i64 e, const float* u, i64 from, i64 n, float* out) const {
    i64 first_row = first(m, at, e), num = rank(m, at, e);
    for (i64 r = 0; r < num; r++) {
      i64 begin = (first_row + r) * m.out + from;
      bf16_ranks ? add_n(u[r], (const bf16*)m.b + begin, n, out) : add_n(u[r], (const float*)m.b + begin, n, out);
    }
  }
};
