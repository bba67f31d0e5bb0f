// Routed experts (spec v4 7.4): out = sum over the chosen experts of w2( weight * silu(min(g, limit)) * clamp(u, limit) ).
#include "adapters.h"
#include "rows.h"

namespace {

struct Experts {
  Weight w1, w3, w2;  // stacks [E, F, C], [E, F, C], [E, C, F]
  i64 num, F, C;
  float limit;
  Quant q;
  int dtype;  // of x: gate, up, activation and each expert's output are rounded to it
  Adapters adapters;
};

// (token, weight) pairs sorted by expert; within one expert by token.
struct Routes {
  i64 num_pairs;
  i64* start;   // [E + 1]
  i64* token;   // [pairs]
  float* weight;
};

Routes sort_routes(const i32* ids, const float* weights, i64 T, i64 K, i64 E) {
  SCRATCH(memory);
  i64* start = memory.get<i64>(E + 1 + T * K * 2);
  Routes routes{0, start, start + E + 1, (float*)(start + E + 1 + T * K)};
  memset(start, 0, (E + 1) * sizeof(i64));
  for (i64 i = 0; i < T * K; i++)
    if (ids[i] >= 0 && ids[i] < E) start[ids[i] + 1]++;
  for (i64 e = 0; e < E; e++) start[e + 1] += start[e];
  routes.num_pairs = start[E];
  for (i64 i = 0; i < T * K; i++) {
    if (ids[i] < 0 || ids[i] >= E) continue;
    i64 at = start[ids[i]]++;
    routes.token[at] = i / K;
    routes.weight[at] = weights[i];
  }
  for (i64 e = E; e > 0; e--) start[e] = start[e - 1];
  start[0] = 0;
  return routes;
}

INLINE V activation(V gate, V up, V weight, float limit, int dtype) {
  if (dtype == BFLOAT16) gate = round_bf16(gate), up = round_bf16(up);
  gate = gate > limit ? splat(limit) : gate;
  up = up > limit ? splat(limit) : up < -limit ? splat(-limit) : up;
  V z = gate * vsigmoid(gate) * up * weight;
  return dtype == BFLOAT16 ? round_bf16(z) : z;
}

struct Tile {
  i64 expert, first, n;  // pairs first .. first + n of one expert
};

i64 cut(const Routes& routes, i64 E, i64 most, Tile* tiles) {
  i64 count = 0;
  for (i64 e = 0; e < E; e++)
    for (i64 i = routes.start[e]; i < routes.start[e + 1]; i += most)
      tiles[count++] = Tile{e, i, routes.start[e + 1] - i < most ? routes.start[e + 1] - i : most};
  return count;
}

// Calls run(n) with the number of rows of a tile, 1 .. FEW: most experts have an odd number of them.
template <class Run> INLINE void with_exactly(i64 n, Run run) {
  switch (n) {
    case 1: return run(SIZE(1));
    case 2: return run(SIZE(2));
    case 3: return run(SIZE(3));
    case 4: return run(SIZE(4));
    case 5: return run(SIZE(5));
    case 6: return run(SIZE(6));
    case 7: return run(SIZE(7));
    default: return run(SIZE(8));
  }
}

// The most rows of a tile, and the words of its inputs.
template <class M> constexpr i64 TILE_ROWS = ON_TILES<M> ? VL : FEW;
template <class M> i64 tile_words(i64 words) { return TILE_ROWS<M> * words; }

// The inputs of `n` rows as `stream` takes them.
template <class M, int FMT> void fill_tile(const u32* const* rows, i64 n, i64 words, u32* to) {
  if (ON_TILES<M>) return pack_lanes(rows, n, words, to, 1), spread<M, FMT>(to, words, 1);
  for (i64 p = 0; p < n; p++) memcpy(to + p * words, rows[p], words * 4), arrange<M, FMT>(to + p * words, words);
}

// `emit(row, p, value)` for the rows first .. stop (64 at most) of the weight and the n rows of a tile.
template <class M, int FMT, class Emit>
INLINE void stream(const Weight& w, i64 first, i64 stop, Factors<M>& factors, const u32* tile, i64 words, i64 n, Emit emit) {
#if SG_TILES
  if constexpr (ON_TILES<M>) {
    V c[ROW_BLOCK + OVERSHOOT];
    tiled_rows<FMT>(w, first, stop - first, w.rows - stop, (const V*)tile, 1, words, c);
    for (i64 row = first; row < stop; row++)
      for (i64 p = 0; p < n; p++) emit(row, p, ((const float*)(c + row - first))[p]);
  }
#endif
  if constexpr (!ON_TILES<M>)
    with_exactly(n, [&](auto few) { dot_rows<M, FMT, few.value>(w, first, stop, factors, (const V*)tile, words / VL, emit); });
}

// The largest rank that an adapter has beside a matrix of an expert; 0 without adapters.
i64 most_ranks(const Experts& x) {
  i64 most = 0;
  for (i64 at = 0; at < x.adapters.count; at++)
    for (i64 e = 0; e < x.num; e++)
      for (const Ranks* m : {&x.adapters.w1, &x.adapters.w3, &x.adapters.w2}) {
        i64 rank = x.adapters.rank(*m, at, e);
        most = rank > most ? rank : most;
      }
  return most;
}

// u[0 .. most) of w1 and u[most .. 2 most) of w3 for the input of one row.
void reduce_input(const Experts& x, const Rows& rows, i64 token, i64 expert, float* u, i64 most) {
  i64 at = x.adapters.of(token);
  if (at < 0) return;
  auto both = [&](auto input) {
    x.adapters.reduce(x.adapters.w1, at, expert, input, u);
    x.adapters.reduce(x.adapters.w3, at, expert, input, u + most);
  };
  rows.dtype == FLOAT32 ? both((const float*)rows.x + token * rows.stride) : both((const bf16*)rows.x + token * rows.stride);
}

// Few rows per expert: every matrix of a chosen expert is streamed once, its rows shared out among the threads.
template <class M, int FMT>
void experts_few(const Experts& x, const Rows& rows, const Routes& routes, i64 T, float* out, int threads) {
  SCRATCH(inputs);
  SCRATCH(tiled);
  SCRATCH(activations);
  SCRATCH(hidden);
  SCRATCH(tile_list);
  i64 words1 = words_of<M, FMT>(x.C), words2 = words_of<M, FMT>(x.F);
  Tile* tiles = tile_list.get<Tile>(routes.num_pairs);
  i64 num_tiles = cut(routes, x.num, TILE_ROWS<M>, tiles);
  u32* prepared = inputs.get<u32>(T * words1);
  u32* x_tiles = tiled.get<u32>(num_tiles * tile_words<M>(words1));
  float* z = activations.get<float>(routes.num_pairs * x.F);
  u32* z_tiles = hidden.get<u32>(num_tiles * tile_words<M>(words2));
  parallel(T * x.C < 16384 ? 1 : threads, T, [&](i64 t) {
    prepare_row<M>(rows, t, x.C, words1, x.q, prepared + t * words1);
  });
  parallel(num_tiles * x.C < 16384 ? 1 : threads, num_tiles, [&](i64 i) {
    const u32* rows_of[TILE_ROWS<M>];
    for (i64 p = 0; p < tiles[i].n; p++) rows_of[p] = prepared + routes.token[tiles[i].first + p] * words1;
    fill_tile<M, FMT>(rows_of, tiles[i].n, words1, x_tiles + i * tile_words<M>(words1));
  });
  // what adapters make of the inputs of w1 and w3, [pair][2][most]; later of w2
  SCRATCH(reduced);
  i64 most = most_ranks(x);
  float* u = most ? reduced.get<float>(routes.num_pairs * 2 * most) : nullptr;
  if (most)
    parallel(threads, num_tiles, [&](i64 i) {
      for (i64 p = tiles[i].first; p < tiles[i].first + tiles[i].n; p++) reduce_input(x, rows, routes.token[p], tiles[i].expert, u + p * 2 * most, most);
    });
  // long stretches of a matrix at a time keep the memory streaming; still a few tasks per thread
  constexpr i64 STEP = 64;
  i64 stretch1 = STEP, stretch2 = x.C / ((threads > 4 ? 8 : 2) * threads) / STEP * STEP;  // many threads end unevenly
  while (2 * stretch1 <= x.F && num_tiles * x.F >= 16 * threads * stretch1) stretch1 *= 2;
  stretch2 = stretch2 < STEP ? STEP : stretch2;
  i64 steps1 = (x.F + stretch1 - 1) / stretch1, steps2 = (x.C + stretch2 - 1) / stretch2;
  parallel(threads, num_tiles * steps1, [&](i64 task) {
    SCRATCH(scales);
    const Tile& tile = tiles[task / steps1];
    Weight w[2] = {x.w1.part(tile.expert), x.w3.part(tile.expert)};
    typename M::Factor* memory = scales.get<typename M::Factor>(2 * Factors<M>::need(x.C));
    Factors<M> factors[2] = {Factors<M>(w[0], memory), Factors<M>(w[1], memory + Factors<M>::need(x.C))};
    i64 end = (task % steps1 + 1) * stretch1 < x.F ? (task % steps1 + 1) * stretch1 : x.F;
    for (i64 first = task % steps1 * stretch1; first < end; first += STEP) {
      i64 stop = first + STEP < end ? first + STEP : end;
      float sums[2][TILE_ROWS<M>][STEP];
      for (int which = 0; which < 2; which++)
        stream<M, FMT>(w[which], first, stop, factors[which], x_tiles + task / steps1 * tile_words<M>(words1), words1, tile.n,
                       [&](i64 row, int t, float value) { sums[which][t][row - first] = value; });
      for (i64 p = 0; most && p < tile.n; p++) {
        i64 at = x.adapters.of(routes.token[tile.first + p]);
        if (at < 0) continue;
        const float* own = u + (tile.first + p) * 2 * most;
        x.adapters.add(x.adapters.w1, at, tile.expert, own, first, stop - first, sums[0][p]);
        x.adapters.add(x.adapters.w3, at, tile.expert, own + most, first, stop - first, sums[1][p]);
      }
      for (i64 p = 0; p < tile.n; p++)
        vectors(stop - first, [&](i64 i, auto left) {
          V weight = splat(routes.weight[tile.first + p]);
          V value = activation(load_n(sums[0][p] + i, left), load_n(sums[1][p] + i, left), weight, x.limit, x.dtype);
          store_n(z + (tile.first + p) * x.F + first + i, value, left);
        });
    }
  });
  parallel(num_tiles * x.F < 16384 ? 1 : threads, num_tiles, [&](i64 i) {
    SCRATCH(rounded);
    u32* rows = rounded.get<u32>(TILE_ROWS<M> * words2);
    const u32* rows_of[TILE_ROWS<M>];
    for (i64 p = 0; p < tiles[i].n; p++) {
      i64 at = most ? x.adapters.of(routes.token[tiles[i].first + p]) : -1;
      if (at >= 0) x.adapters.reduce(x.adapters.w2, at, tiles[i].expert, z + (tiles[i].first + p) * x.F, u + (tiles[i].first + p) * 2 * most);
      prepare_row<M>(Rows{z, x.F, FLOAT32}, tiles[i].first + p, x.F, words2, x.q, rows + p * words2);
      rows_of[p] = rows + p * words2;
    }
    fill_tile<M, FMT>(rows_of, tiles[i].n, words2, z_tiles + i * tile_words<M>(words2));
  });
  parallel(threads, steps2, [&](i64 task) {
    SCRATCH(scales);
    SCRATCH(addends);
    i64 first = task * stretch2, stop = first + stretch2 < x.C ? first + stretch2 : x.C;
    float* added = most ? addends.get<float>(TILE_ROWS<M> * stretch2) : nullptr;
    for (i64 t = 0; t < T; t++) memset(out + t * x.C + first, 0, (stop - first) * 4);
    for (i64 i = 0; i < num_tiles; i++) {
      Weight w = x.w2.part(tiles[i].expert);
      Factors<M> factors(w, scales.get<typename M::Factor>(Factors<M>::need(w.cols)));
      if (most) memset(added, 0, TILE_ROWS<M> * stretch2 * sizeof(float));
      for (i64 p = 0; most && p < tiles[i].n; p++) {
        i64 at = x.adapters.of(routes.token[tiles[i].first + p]);
        if (at >= 0) x.adapters.add(x.adapters.w2, at, tiles[i].expert, u + (tiles[i].first + p) * 2 * most, first, stop - first, added + p * stretch2);
      }
      for (i64 row = first; row < stop; row += STEP)
        stream<M, FMT>(w, row, row + STEP < stop ? row + STEP : stop, factors, z_tiles + i * tile_words<M>(words2), words2, tiles[i].n,
                       [&](i64 row, int p, float value) {
                         if (most) value += added[p * stretch2 + row - first];
                         float y = x.dtype == BFLOAT16 ? round_bf16(value) : value;
                         out[routes.token[tiles[i].first + p] * x.C + row] += y;
                       });
    }
  });
}

// z [F][count vectors] of one panel, a token per lane: rounded in blocks of channels and folded into words, in place.
template <class M, int FMT> void fold_panel(V* z, i64 F, i64 words, int count, const Quant& q) {
  auto round_blocks = [&](auto rounding) {
    typedef decltype(rounding) R;
    for (i64 first = 0; first < F; first += q.block)
      for (int j = 0; j < count; j++) {
        i64 stop = first + q.block < F ? first + q.block : F;
        V amax = {};
        for (i64 f = first; f < stop; f++) amax = vmax(vabs(z[f * count + j]), amax);
        const typename R::Grid grid = R::grid(R::scale(amax));
        for (i64 f = first; f < stop; f++) z[f * count + j] = R::round(z[f * count + j], grid, q.to_bf16);
      }
  };
  if (q.element) with_rounding(q, round_blocks);
  if constexpr (M::per_word == 2) {
    for (i64 f = 0; f < F; f += 2)
      for (int j = 0; j < count; j++) {
        VU low = (VU)z[f * count + j] >> 16, high = f + 1 < F ? (VU)z[(f + 1) * count + j] & 0xffff0000u : VU{};
        z[f / 2 * count + j] = (V)(low | high);
      }
  }
  for (i64 i = (F + M::per_word - 1) / M::per_word * count; i < words * count; i++) z[i] = V{};
  spread<M, FMT>((u32*)z, words, count);
}

// Many rows per expert: one task multiplies up to four panels of tokens with one expert; the sum over experts comes after.
template <class M, int FMT>
void experts_many(const Experts& x, const Rows& rows, const Routes& routes, i64 T, i64 K, float* out, int threads) {
  SCRATCH(tile_list);
  SCRATCH(outputs);
  SCRATCH(token_pairs);
  constexpr i64 PANELS = 4;
  i64 words1 = words_of<M, FMT>(x.C), words2 = words_of<M, FMT>(x.F), z_rows = words2 * M::per_word;
  size_t element = x.dtype == BFLOAT16 ? 2 : 4;
  char* y = outputs.get<char>(routes.num_pairs * x.C * element);
  Tile* tiles = tile_list.get<Tile>(routes.num_pairs);
  i64 num_tiles = cut(routes, x.num, PANELS * MAX_LANES, tiles), most = most_ranks(x);
  parallel(threads, num_tiles, [&](i64 task) {
    SCRATCH(packed);
    SCRATCH(hidden);
    SCRATCH(decoded);
    SCRATCH(sums);
    SCRATCH(scales);
    const Tile& tile = tiles[task];
    i64 panels = (tile.n + MAX_LANES - 1) / MAX_LANES, longest = words1 > words2 ? words1 : words2;
    u32* lanes = packed.get<u32>(panels * MAX_LANES * words1);
    V* z = hidden.get<V>(panels * MAX_COUNT * z_rows);
    i64 block_words = (longest + KB - 1) / KB * ROW_BLOCK * LDW;
    u32* block = decoded.get<u32>(2 * block_words);
    V* c = sums.get<V>(2 * (ROW_BLOCK + OVERSHOOT) * MAX_COUNT);
    auto size_of = [&](i64 p) { return tile.n - p * MAX_LANES < MAX_LANES ? tile.n - p * MAX_LANES : MAX_LANES; };
    SCRATCH(reduced);
    SCRATCH(addends);
    float* u = most ? reduced.get<float>(tile.n * 2 * most) : nullptr;
    float* added = most ? addends.get<float>(tile.n * x.C + x.F) : nullptr;  // of w2; and one activation
    for (i64 i = 0; most && i < tile.n; i++) reduce_input(x, rows, routes.token[tile.first + i], tile.expert, u + i * 2 * most, most);
    // adds what adapters make of `which` to sums [n channels][count vectors of tokens] of panel p
    auto add_lanes = [&](const Ranks& which, i64 from, i64 p, i64 first, i64 n, int count, V* c) {
      float channel[ROW_BLOCK];
      for (i64 i = 0; most && i < size_of(p); i++) {
        i64 at = x.adapters.of(routes.token[tile.first + p * MAX_LANES + i]);
        if (at < 0) continue;
        memset(channel, 0, sizeof(channel));
        x.adapters.add(which, at, tile.expert, u + (p * MAX_LANES + i) * 2 * most + from, first, n, channel);
        for (i64 r = 0; r < n; r++) ((float*)c)[r * count * VL + i] += channel[r];
      }
    };
    for (i64 p = 0; p < panels; p++)
      pack_panel<M, FMT>(rows, routes.token + tile.first, p * MAX_LANES, size_of(p), x.C, words1, x.q, lanes + p * MAX_LANES * words1);
    Weight w1 = x.w1.part(tile.expert), w3 = x.w3.part(tile.expert), w2 = x.w2.part(tile.expert);
    typename M::Factor* memory = scales.get<typename M::Factor>(2 * Factors<M>::need(x.C > x.F ? x.C : x.F));
    Factors<M> f1(w1, memory), f3(w3, memory + Factors<M>::need(x.C)), f2(w2, memory);
    // the rows of a matrix from `next` on, which come while the first panel is multiplied
    auto after = [&](const Weight& w, i64 next, i64 p, int count, i64 words) {
      i64 n = w.rows - next < ROW_BLOCK ? w.rows - next : ROW_BLOCK;
      if (p > 0 || n <= 0) return Ahead();
      return Ahead{w.data + next * w.row_bytes(), n * w.row_bytes() / (tiles_of(ROW_BLOCK, count) * words)};
    };
    for (i64 first = 0; first < x.F; first += ROW_BLOCK) {
      i64 n = x.F - first < ROW_BLOCK ? x.F - first : ROW_BLOCK;
      decode_rows<M, FMT>(w1, first, n, f1, block, ROW_BLOCK);
      decode_rows<M, FMT>(w3, first, n, f3, block + block_words, ROW_BLOCK);
      for (i64 p = 0; p < panels; p++) {
        int count = count_of(size_of(p));
        V *up = c + (ROW_BLOCK + OVERSHOOT) * MAX_COUNT, *to = z + p * MAX_COUNT * z_rows + first * count;
        product<M>(block, ROW_BLOCK, n, lanes + p * MAX_LANES * words1, count, words1, c, true, after(w1, first + n, p, count, words1));
        product<M>(block + block_words, ROW_BLOCK, n, lanes + p * MAX_LANES * words1, count, words1, up, true,
                   after(w3, first + n, p, count, words1));
        add_lanes(x.adapters.w1, 0, p, first, n, count, c);
        add_lanes(x.adapters.w3, most, p, first, n, count, up);
        for (int j = 0; j < count; j++) {
          V weight = load_n(routes.weight + tile.first + p * MAX_LANES + j * VL, size_of(p) - j * VL);
          for (i64 r = 0; r < n; r++) to[r * count + j] = activation(c[r * count + j], up[r * count + j], weight, x.limit, x.dtype);
        }
      }
    }
    if (most) memset(added, 0, tile.n * x.C * sizeof(float));
    for (i64 i = 0; most && i < tile.n; i++) {
      i64 at = x.adapters.of(routes.token[tile.first + i]), p = i / MAX_LANES, count = count_of(size_of(p));
      if (at < 0) continue;
      float* own = added + tile.n * x.C;
      for (i64 f = 0; f < x.F; f++) own[f] = ((const float*)(z + p * MAX_COUNT * z_rows))[f * count * VL + i % MAX_LANES];
      x.adapters.reduce(x.adapters.w2, at, tile.expert, own, u + i * 2 * most);
      x.adapters.add(x.adapters.w2, at, tile.expert, u + i * 2 * most, 0, x.C, added + i * x.C);
    }
    for (i64 p = 0; p < panels; p++) fold_panel<M, FMT>(z + p * MAX_COUNT * z_rows, x.F, words2, count_of(size_of(p)), x.q);
    Output to{y + tile.first * x.C * element, x.C, x.dtype, added, nullptr};
    f2 = Factors<M>(w2, memory);
    for (i64 first = 0; first < x.C; first += ROW_BLOCK) {
      i64 n = x.C - first < ROW_BLOCK ? x.C - first : ROW_BLOCK;
      decode_rows<M, FMT>(w2, first, n, f2, block, ROW_BLOCK);
      for (i64 p = 0; p < panels; p++) {
        int count = count_of(size_of(p));
        product<M>(block, ROW_BLOCK, n, (const u32*)(z + p * MAX_COUNT * z_rows), count, words2, c, true,
                   after(w2, first + n, p, count, words2));
        turn_out(c, n, count, p * MAX_LANES, size_of(p), first, to);
      }
    }
  });
  i64* pairs = token_pairs.get<i64>(T * (K + 1));  // per token: how many, then which, in ascending order of experts
  for (i64 t = 0; t < T; t++) pairs[t * (K + 1)] = 0;
  for (i64 i = 0; i < routes.num_pairs; i++) {
    i64* of_token = pairs + routes.token[i] * (K + 1);
    of_token[++of_token[0]] = i;
  }
  parallel(threads, (T + 15) / 16, [&](i64 task) {
    auto add_up = [&](const auto* from) {
      for (i64 t = task * 16; t < T && t < task * 16 + 16; t++)
        vectors(x.C, [&](i64 c, auto left) {
          V total = {};
          for (i64 k = 1; k <= pairs[t * (K + 1)]; k++) total += load_n(from + pairs[t * (K + 1) + k] * x.C + c, left);
          store_n(out + t * x.C + c, total, left);
        });
    };
    x.dtype == BFLOAT16 ? add_up((const bf16*)y) : add_up((const float*)y);
  });
}

}  // namespace

// x [T, C], ids [T, K] (-1 = none), weights [T, K] -> out fp32 [T, C]. `adapter` [T] and what follows it: see `Adapters`.
extern "C" void sg_experts(const void* x, int dtype, i64 T, i64 K, const i32* ids, const float* weights, const void* w1,
                           const void* w3, const void* w2, const void* s1, const void* s3, const void* s2, i64 num, i64 F,
                           i64 C, int format, int scale_kind, int block_rows, int block_cols, float limit, int element,
                           int block, int e4m3_scale, const i32* adapter, const i32* adapter_ids, i64 num_adapters, int bf16_ranks,
                           const void* a1, const void* b1, const float* f1, const i32* r1, const void* a3, const void* b3, const float* f3,
                           const i32* r3, const void* a2, const void* b2, const float* f2, const i32* r2, float* out, int threads) {
  auto stack = [&](const void* data, const void* scale, i64 rows, i64 cols) {
    return Weight{(const u8*)data, (const u8*)scale, rows, cols, format, scale_kind, block_rows, block_cols};
  };
  Experts experts{stack(w1, s1, F, C), stack(w3, s3, F, C), stack(w2, s2, C, F), num, F, C, limit, Quant{element, block, e4m3_scale, e4m3_scale && dtype == BFLOAT16}, dtype,
                  Adapters{adapter, adapter_ids, num_adapters, num, bf16_ranks, Ranks{a1, b1, f1, r1, C, F}, Ranks{a3, b3, f3, r3, C, F}, Ranks{a2, b2, f2, r2, F, C}}};
  i64 step = (i64)32 << 20;
  step = step / (K * C) < 256 ? 256 : step / (K * C);  // rows at once, so that the outputs to be summed stay below 64 MB
  with_format(experts.w1, fits_pairs(experts.w1, dtype, experts.q), [&](auto words, auto fmt) {
    typedef decltype(words) M;
    constexpr int FMT = fmt.value;
    for (i64 t = 0; t < T; t += step) {
      i64 n = T - t < step ? T - t : step, active = 0;
      if (adapter) experts.adapters.adapter = adapter + t;
      Routes routes = sort_routes(ids + t * K, weights + t * K, n, K, num);
      for (i64 e = 0; e < num; e++) active += routes.start[e + 1] > routes.start[e];
      Rows rows{(const char*)x + t * C * (dtype == BFLOAT16 ? 2 : 4), C, dtype};
      if (routes.num_pairs <= active * TILE_ROWS<M>) experts_few<M, FMT>(experts, rows, routes, n, out + t * C, threads);
      else experts_many<M, FMT>(experts, rows, routes, n, K, out + t * C, threads);
    }
  });
}

ON_TAPE(sg_experts)
