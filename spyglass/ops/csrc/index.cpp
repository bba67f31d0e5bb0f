// The indexer's choice of rows: scores with keys in lanes, then selection per query.
#include <algorithm>
#include <functional>

#include "pages.h"

namespace {

struct Index {
  const void* q;        // [T, N, I]
  const void* weights;  // [T, N]
  float weight_scale;   // the product is rounded like the weights
  int q_dtype, weight_dtype;
  i64 T, N, I;
  Pages keys;
  const i32 *seq, *visible;
  const i32* blocks;  // [T, Y] blocks of entries that may be picked, -1 = none; null: any entry
  i64 Y, block_size, X, max_visible;
  bool stepwise;
  i32* topk_indices;  // [T, X]
  i64 seen(i64 t) const { return std::min<i64>(visible[t], max_visible); }
};

// Scores of one query against `count` vectors of keys in lanes.
template <class M> void index_scores(const Index& x, i64 t, const u32* q_rows, i64 cap, i64 words, const u32* lanes, V* out) {
  SCRATCH(dots);
  V* c = dots.get<V>((x.N + OVERSHOOT) * MAX_COUNT);
  product<M>(q_rows, cap, x.N, lanes, MAX_COUNT, words, c);
  bool round = x.stepwise && x.q_dtype == BFLOAT16;
  V total[MAX_COUNT] = {};
  for (i64 n = 0; n < x.N; n++) {
    float w = x.weight_dtype == BFLOAT16 ? round_bf16(widen1(((const bf16*)x.weights)[t * x.N + n]) * x.weight_scale)
                                         : ((const float*)x.weights)[t * x.N + n] * x.weight_scale;
    for (int j = 0; j < MAX_COUNT; j++) {
      V dot = c[n * MAX_COUNT + j];
      if (round) dot = round_bf16(dot);
      dot = (dot > 0.0f ? dot : dot == dot ? V{} : dot) * w;
      total[j] += round ? round_bf16(dot) : dot;
    }
  }
  for (int j = 0; j < MAX_COUNT; j++) out[j] = round ? round_bf16(total[j]) : total[j];
}

// Entries of query t that may be picked, ascending; their number.
i64 candidates(const Index& x, i64 t, i32* out) {
  i64 seen = x.seen(t), count = 0;
  if (!x.blocks) {
    for (i64 i = 0; i < seen; i++) out[i] = i;
    return seen;
  }
  SCRATCH(memory);
  i64 num = (seen + x.block_size - 1) / std::max<i64>(x.block_size, 1);
  bool* listed = memory.get<bool>(num);
  std::fill(listed, listed + num, false);
  for (i64 y = 0; y < x.Y; y++) {
    i64 block = x.blocks[t * x.Y + y];
    if (block >= 0 && block < num) listed[block] = true;
  }
  for (i64 i = 0; i < seen; i++)
    if (listed[i / x.block_size]) out[count++] = i;
  return count;
}

// The X best candidates, ties to the lowest entry, ascending; -inf is never picked, NaN first. Without scores all are taken.
void pick_best(const Index& x, i64 t, const float* scores) {
  SCRATCH(memory);
  i32* entries = memory.get<i32>(3 * x.seen(t));
  u32 *rank = (u32*)entries + x.seen(t), *order = rank + x.seen(t);
  i32* topk_indices = x.topk_indices + t * x.X;
  i64 n = candidates(x, t, entries), above = 0, count = 0;
  const u32 NEVER = 0x007fffff;  // what -inf becomes
  for (i64 i = 0; i < n; i++) {
    u32 bits = scores ? load<u32>(scores + entries[i]) : 0;
    bits = bits << 1 > 0xff000000u ? 0x7fffffffu : bits;  // what is no number, of either sign, is above all
    rank[i] = bits >> 31 ? ~bits : bits | 0x80000000u;
  }
  u32 least = 0;
  if (n > x.X) {  // the X-th best rank: its upper bits by counting, the rest among those that share them
    i64 bins[2048] = {}, bin = 2047, left = x.X, same = 0;
    for (i64 i = 0; i < n; i++) bins[rank[i] >> 21]++;
    for (; bins[bin] < left; bin--) left -= bins[bin];
    for (i64 i = 0; i < n; i++)
      if (rank[i] >> 21 == (u32)bin) order[same++] = rank[i];
    std::nth_element(order, order + left - 1, order + same, std::greater<u32>());
    least = order[left - 1];
    for (i64 i = 0; i < n; i++) above += rank[i] > least;
  }
  i64 ties = x.X - above;
  for (i64 i = 0; i < n && count < x.X; i++) {
    if (rank[i] <= NEVER || rank[i] < least) continue;
    if (n > x.X && rank[i] == least && ties-- <= 0) continue;
    topk_indices[count++] = entries[i];
  }
  std::fill(topk_indices + count, topk_indices + x.X, -1);
}

template <class M> void index_topk(const Index& x, int threads) {
  SCRATCH(key_memory);
  SCRATCH(score_memory);
  constexpr i64 BLOCK = 64, GROUP_PANELS = 8;
  i64 words = row_size<M>(x.I);
  for (i64 start = 0, stop; start < x.T; start = stop) {
    i64 most = 0;
    for (stop = start; stop < x.T && x.seq[stop] == x.seq[start]; stop++) most = std::max(most, x.seen(stop));
    if (most <= x.X) {  // everything visible is chosen, whatever it scores
      for (i64 t = start; t < stop; t++) pick_best(x, t, nullptr);
      continue;
    }
    i64 panels = (most + MAX_LANES - 1) / MAX_LANES, groups = (panels + GROUP_PANELS - 1) / GROUP_PANELS;
    u32* lanes = key_memory.get<u32>(panels * MAX_LANES * words);
    float* scores = score_memory.get<float>(BLOCK * panels * MAX_LANES);
    parallel(threads, panels, [&](i64 p) {
      SCRATCH(row_memory);
      u32* rows = row_memory.get<u32>(MAX_LANES * words);
      const u32* at[MAX_LANES];
      i64 n = std::min<i64>(most - p * MAX_LANES, MAX_LANES);
      for (i64 i = 0; i < n; i++) {
        at[i] = rows + i * words;
        read_row<M>(x.keys.row(x.seq[start], p * MAX_LANES + i), x.keys.form, words, rows + i * words);
      }
      pack_lanes(at, n, words, lanes + p * MAX_LANES * words, MAX_COUNT);
    });
    for (i64 first = start; first < stop; first += BLOCK) {
      i64 queries = std::min(stop - first, BLOCK);
      parallel(threads, queries * groups, [&](i64 task) {
        SCRATCH(q_memory);
        SCRATCH(row_memory);
        i64 t = first + task / groups, panel = task % groups * GROUP_PANELS, cap = x.N + OVERSHOOT;
        if (panel * MAX_LANES >= x.seen(t) || x.seen(t) <= x.X) return;
        u32* q_rows = q_memory.get<u32>((words + KB - 1) / KB * cap * LDW);
        u32* row = row_memory.get<u32>(words);
        for (i64 n = 0; n < x.N; n++) {
          prepare_row<M>(Rows{x.q, x.I, x.q_dtype}, t * x.N + n, x.I, words, Quant{NONE, 0, 0}, row);
          for (i64 word = 0; word < words; word += VL) store(word_of_row(q_rows, cap, n, word), load<V>(row + word));
        }
        for (i64 p = panel; p < std::min(panel + GROUP_PANELS, panels) && p * MAX_LANES < x.seen(t); p++)
          index_scores<M>(x, t, q_rows, cap, words, lanes + p * MAX_LANES * words,
                          (V*)(scores + ((t - first) * panels + p) * MAX_LANES));
      });
      parallel(threads, queries, [&](i64 i) {
        pick_best(x, first + i, x.seen(first + i) > x.X ? scores + i * panels * MAX_LANES : nullptr);
      });
    }
  }
}

}  // namespace

extern "C" void sg_index_topk(const void* q, int q_dtype, const void* weights, int weight_dtype, float weight_scale, i64 T, i64 N, i64 I, const void* keys,
                              i64 key_format, i64 page_rows, const i32* table, i64 table_cols, const i32* seq, const i32* visible,
                              const i32* blocks, i64 Y, i64 block_size, i64 X, i64 max_visible, int stepwise, i32* topk_indices,
                              int threads) {
  Pages pages{(const char*)keys, table, page_rows, table_cols, RowForm(key_format, I)};
  Index x{q, weights, weight_scale, q_dtype, weight_dtype, T, N, I, pages, seq, visible, blocks, Y, block_size, X, max_visible, stepwise != 0, topk_indices};
#if SG_PAIRS
  if (in_pairs(q_dtype, pages.form)) return index_topk<Pairs>(x, threads);
#endif
  index_topk<Floats>(x, threads);
}

ON_TAPE(sg_index_topk)
