// Attention of one latent row per token, key and value at once, and the indexer's choice of rows.
//
// Scores are the product of key rows with the heads of one query in lanes, so that softmax runs lane by lane over keys and
// nothing is ever summed across lanes; the output is the product of probability rows (one per head) with value lanes, in
// which neighbouring keys form a word. Queries that follow one another share their window rows, decoded once.
#include <algorithm>
#include <functional>

#include "rows.h"

namespace {

constexpr i64 QUERIES = 16;  // that share one set of window rows
constexpr i64 STRIDE = 48;   // key rows are shared out in multiples of every tile height

// Paged rows: row n of sequence s lies in page table[s][(n / page_rows) % table_cols].
struct Pages {
  const char* data;
  const i32* table;
  i64 page_rows, table_cols, D;
  int dtype;
  const char* row(i64 seq, i64 n) const {
    i64 page = table[seq * table_cols + n / page_rows % table_cols];
    return data + (page * page_rows + n % page_rows) * D * (dtype == BFLOAT16 ? 2 : 4);
  }
};

// VL words of a stored row (null: zeros), from channel word * per_word on.
template <class M> INLINE V row_words(const char* row, int dtype, i64 word, i64 D) {
  if (!row) return V{};
  if constexpr (M::per_word == 2) {
    i64 bytes = (D - 2 * word) * 2;
    if (bytes >= 4 * VL) return load<V>(row + 4 * word);
    V part = {};
    if (bytes > 0) memcpy(&part, row + 4 * word, bytes);
    return part;
  } else {
    if (D <= word) return V{};
    return dtype == BFLOAT16 ? load_n((const bf16*)row + word, D - word) : load_n((const float*)row + word, D - word);
  }
}

template <class M> INLINE i64 row_size(i64 D) { return ((D + M::per_word - 1) / M::per_word + VL - 1) / VL * VL; }

// A list of stored rows, laid out as keys (Rows) and as values (Lanes of channels; a word holds M::per_word keys).
template <class M> struct Keys {
  Scratch list, keys, values;
  const char** at = nullptr;
  i64 n = 0, cap = 0, words = 0, D = 0;
  int dtype = 0;
  u32 *key_rows = nullptr, *value_lanes = nullptr;

  void reserve(i64 most, i64 channels, int type) {
    D = channels, dtype = type, words = row_size<M>(D);
    at = list.get<const char*>(most + 2);
    cap = (most + STRIDE) / STRIDE * STRIDE + STRIDE;
    key_rows = keys.template get<u32>((words + KB - 1) / KB * cap * LDW);
    value_lanes = values.template get<u32>((D + MAX_LANES - 1) / MAX_LANES * MAX_LANES * (most + 2));
  }
  i64 steps() const { return (n + M::per_word - 1) / M::per_word; }
  // Rows first .. stop of the list into the key rows from `place` on.
  void lay_keys(i64 first, i64 stop, i64 place) {
    for (i64 i = first; i < stop; i++)
      for (i64 word = 0; word < words; word += VL)
        store(word_of_row(key_rows, cap, place + i - first, word), row_words<M>(at[i], dtype, word, D));
  }
  u32* panel(i64 place) { return value_lanes + place * MAX_LANES * steps(); }
  int panel_count(i64 p) const { return count_of(D - p * MAX_LANES); }
  // Channels of panel p of all rows.
  void lay_values(i64 p, i64 place) {
    V* out = (V*)panel(place);
    int count = panel_count(p);
    for (i64 step = 0; step < steps(); step++)
      for (int j = 0; j < count; j++) {
        i64 channel = p * MAX_LANES + j * VL;
        if constexpr (M::per_word == 2) {
          const char *a = at[2 * step], *b = 2 * step + 1 < n ? at[2 * step + 1] : nullptr;
          VU low = a ? (VU)load_n((const bf16*)a + channel, D - channel) >> 16 : VU{};
          VU high = b ? (VU)load_n((const bf16*)b + channel, D - channel) : VU{};
          out[step * count + j] = (V)(low | high);
        } else {
          out[step * count + j] = row_words<M>(at[step], dtype, channel, D);
        }
      }
  }
};

struct Attention {
  const void* q;  // [T, H, D]
  int dtype;
  i64 T, H, D;
  Pages window, pool;
  const i32 *seq, *lo, *hi, *visible, *picks;  // picks [T, X]
  i64 X, window_width, pool_width;
  const float* sink;
  float scale;
  void* out;

  i64 last(i64 t) const { return std::min<i64>(hi[t], lo[t] + window_width - 1); }
  // Compressed rows of query t when they are simply the first ones; -1 when they have to be listed.
  i64 first_rows(i64 t) const {
    if (!pool.data) return 0;
    if (!picks) return std::min<i64>(visible[t], pool_width);
    const i32* pick = picks + t * X;
    i64 n = 0;
    while (n < X && pick[n] == n && n < visible[t]) n++;
    for (i64 i = n; i < X; i++)
      if (pick[i] >= 0 && pick[i] < visible[t]) return -1;
    return n;
  }
};

// Consecutive queries of one sequence: window positions base .. base + width - 1, then `pooled` compressed rows.
struct Block {
  i64 first, n, base, width, pooled;
};

i64 cut_blocks(const Attention& a, Block* blocks) {
  i64 count = 0;
  for (i64 t = 0; t < a.T;) {
    Block b{t, 0, 0, 0, 0};
    for (; t < a.T && b.n < QUERIES && a.seq[t] == a.seq[b.first]; t++, b.n++) {
      i64 lo = a.lo[t], hi = a.last(t);
      if (lo <= hi) {
        i64 base = b.width ? std::min(b.base, lo) : lo, stop = b.width ? std::max(b.base + b.width, hi + 1) : hi + 1;
        if (b.width && stop - base > a.window_width + QUERIES) break;  // ranges that do not overlap share nothing
        b.base = base, b.width = stop - base;
      }
      b.pooled = std::max(b.pooled, a.first_rows(t));
    }
    blocks[count++] = b;
  }
  return count;
}

template <class M> struct Workspace {
  Keys<M> shared, listed;
  Scratch q_rows, q_lanes, scores, listed_scores, probability, listed_probability, totals;
};

// Walks blocks of queries, alone or together with other threads. Queries are taken in groups whose heads fill the lanes;
// one that picked rows for itself goes alone.
template <class M> class Attender {
 public:
  Attender(const Attention& a, Workspace<M>& w, Part part, const Block* next = nullptr) : a_(a), w_(w), part_(part), next_(next) {
    heads_ = std::min<i64>(a.H, MAX_LANES), vectors_ = (heads_ + VL - 1) / VL, lanes_ = vectors_ * VL;
  }

  void block(const Block& b) {
    Keys<M>& keys = w_.shared;
    if (part_.rank == 0) list_shared(b);
    part_.barrier();
    for (i64 i = part_.rank * STRIDE; i < keys.n; i += part_.size * STRIDE) keys.lay_keys(i, std::min(i + STRIDE, keys.n), i);
    for (i64 p = part_.rank; p * MAX_LANES < a_.D; p += part_.size) keys.lay_values(p, p);
    part_.barrier();
    for (i64 head = 0; head < a_.H; head += heads_)
      for (i64 t = b.first, n; t < b.first + b.n; t += n) {
        n = 1;
        while (a_.first_rows(t) >= 0 && n < MAX_COUNT / vectors_ && t + n < b.first + b.n && a_.first_rows(t + n) >= 0) n++;
        queries(b, t, n, head, std::min(heads_, a_.H - head));
      }
  }

 private:
  const Attention& a_;
  Workspace<M>& w_;
  Part part_;
  const Block* next_;  // whose window rows are fetched meanwhile
  i64 heads_, vectors_, lanes_;  // of one query at a time

  void list_shared(const Block& b) {
    Keys<M>& keys = w_.shared;
    keys.reserve(b.width + b.pooled, a_.D, a_.window.dtype);
    keys.n = b.width + b.pooled;
    std::fill(keys.at, keys.at + keys.n, nullptr);  // a position that no query sees may hold anything
    for (i64 t = b.first; t < b.first + b.n; t++)
      for (i64 position = a_.lo[t]; position <= a_.last(t); position++)
        if (!keys.at[position - b.base]) keys.at[position - b.base] = a_.window.row(a_.seq[t], position);
    for (i64 entry = 0; entry < b.pooled; entry++) keys.at[b.width + entry] = a_.pool.row(a_.seq[b.first], entry);
  }

  // The next block's window rows, those of piece `index` of PIECES, over `steps` steps of a product.
  static constexpr i64 PIECES = 12;
  Ahead ahead(i64 index, i64 steps) const {
    if (!next_ || next_->n > 1 || !next_->width || index >= PIECES) return Ahead();
    i64 first = next_->base + next_->width * index / PIECES, bytes = a_.D * (a_.window.dtype == BFLOAT16 ? 2 : 4);
    return Ahead{(const u8*)a_.window.row(a_.seq[next_->first], first), next_->width * bytes / (PIECES * steps)};
  }

  void list_picks(i64 t) {
    Keys<M>& keys = w_.listed;
    keys.n = 0;
    if (a_.first_rows(t) >= 0) return;
    keys.reserve(a_.X, a_.D, a_.pool.dtype);
    for (i64 i = 0; i < a_.X; i++) {
      i64 entry = a_.picks[t * a_.X + i];
      if (entry >= 0 && entry < a_.visible[t]) keys.at[keys.n++] = a_.pool.row(a_.seq[t], entry);
    }
  }

  i64 probability_cap(i64 n) const { return n * lanes_ + OVERSHOOT; }

  void pack_queries(i64 t, i64 n, i64 head, i64 heads) {
    i64 words = w_.shared.words;
    u32* rows = w_.q_rows.template get<u32>(n * heads * words);
    const u32* at[MAX_LANES] = {};
    for (i64 i = 0; i < n; i++)
      for (i64 h = 0; h < heads; h++, rows += words) {
        prepare_row<M>(Rows{a_.q, a_.D, a_.dtype}, (t + i) * a_.H + head + h, a_.D, words, Quant{NONE, 0, 0}, rows);
        at[i * lanes_ + h] = rows;
      }
    pack_lanes(at, n * lanes_, words, w_.q_lanes.template get<u32>(words * n * lanes_), n * vectors_);
  }

  void queries(const Block& b, i64 t, i64 n, i64 head, i64 heads) {
    Keys<M>&keys = w_.shared, &listed = w_.listed;
    if (part_.rank == 0) {
      list_picks(t);
      pack_queries(t, n, head, heads);
      w_.scores.template get<V>((keys.n + STRIDE) * n * vectors_);
      w_.listed_scores.template get<V>((listed.n + STRIDE) * vectors_);
      w_.probability.template get<u32>((keys.steps() / KB + 1) * probability_cap(n) * LDW);
      w_.listed_probability.template get<u32>((listed.steps() / KB + 1) * probability_cap(1) * LDW);
      w_.totals.template get<V>(MAX_COUNT);
    }
    part_.barrier();
    V *scores = (V*)w_.scores.memory, *listed_scores = (V*)w_.listed_scores.memory;
    score(keys, n * vectors_, scores, false);
    score(listed, vectors_, listed_scores, true);
    part_.barrier();
    if (part_.rank == 0) {
      for (i64 i = 0; i < n; i++) softmax(b, t + i, head, heads, i, n * vectors_, scores, listed_scores);
      fold(scores, keys.n, n, (u32*)w_.probability.memory);
      fold(listed_scores, listed.n, 1, (u32*)w_.listed_probability.memory);
    }
    part_.barrier();
    for (i64 p = part_.rank; p * MAX_LANES < a_.D; p += part_.size) output(t, n, head, heads, p);
    part_.barrier();
  }

  // scores [key][count vectors of heads]; rows not laid out before are, a stretch at a time.
  void score(Keys<M>& keys, int count, V* scores, bool lay) {
    for (i64 i = part_.rank * STRIDE; i < keys.n; i += part_.size * STRIDE) {
      i64 stop = std::min(i + STRIDE, keys.n), place = lay && part_.size == 1 ? 0 : i;
      if (lay) keys.lay_keys(i, stop, place);
      product<M>(keys.key_rows + place * LDW, keys.cap, stop - i, (const u32*)w_.q_lanes.memory, count, keys.words, scores + i * count, true,
                 ahead(i / STRIDE, tiles_of(stop - i, count) * keys.words));
    }
  }

  // Probabilities of one vector of heads over keys first .. stop, in place of their scores, rounded like q; their sum.
  V exponentials(V* scores, i64 first, i64 stop, i64 count, V most) const {
    V total = {};
    for (i64 i = first; i < stop; i++) {
      V p = vexp(scores[i * count] * a_.scale - most);
      total += p;
      scores[i * count] = a_.dtype == BFLOAT16 ? round_bf16(p) : p;
    }
    return total;
  }
  static void clear(V* scores, i64 first, i64 stop, i64 count) {
    for (i64 i = first; i < stop; i++) scores[i * count] = V{};
  }

  // Query t, the i-th of its group, whose scores have `count` vectors per key.
  void softmax(const Block& b, i64 t, i64 head, i64 heads, i64 i, i64 count, V* scores, V* listed) {
    bool sees = a_.lo[t] <= a_.last(t);
    i64 from = sees ? a_.lo[t] - b.base : 0, to = sees ? a_.last(t) + 1 - b.base : 0;
    i64 pooled = b.width + std::max<i64>(a_.first_rows(t), 0);
    for (i64 j = 0; j < vectors_; j++) {
      V* s = scores + i * vectors_ + j;
      V most = splat(-__builtin_inff());
      for (i64 k = from; k < to; k++) most = vmax(s[k * count], most);
      for (i64 k = b.width; k < pooled; k++) most = vmax(s[k * count], most);
      for (i64 k = 0; k < w_.listed.n; k++) most = vmax(listed[k * vectors_ + j], most);
      most = vmax(most * a_.scale, splat(-1e30f));
      V total = exponentials(s, from, to, count, most) + exponentials(s, b.width, pooled, count, most) +
                exponentials(listed + j, 0, w_.listed.n, vectors_, most);
      clear(s, 0, from, count);
      clear(s, to, b.width, count);
      clear(s, pooled, w_.shared.n, count);
      ((V*)w_.totals.memory)[i * vectors_ + j] = total + vexp(load_n(a_.sink + head + j * VL, heads - j * VL) - most);
    }
  }

  // [key][heads of n queries in lanes] to rows of words, one per head; neighbouring keys share a word.
  void fold(const V* p, i64 num_keys, i64 n, u32* rows) const {
    i64 steps = (num_keys + M::per_word - 1) / M::per_word, count = n * vectors_;
    for (i64 step = 0; step < steps; step += VL)
      for (i64 j = 0; j < count; j++) {
        VU v[VL];
        for (int i = 0; i < VL; i++) {
          i64 key = (step + i) * M::per_word;
          v[i] = key < num_keys ? (VU)p[key * count + j] : VU{};
          if (M::per_word == 2) v[i] = v[i] >> 16 | (key + 1 < num_keys ? (VU)p[(key + 1) * count + j] : VU{});
        }
        transpose(v);
        for (int lane = 0; lane < VL; lane++) store(word_of_row(rows, probability_cap(n), j * VL + lane, step), v[lane]);
      }
  }

  void output(i64 t, i64 n, i64 head, i64 heads, i64 p) {
    SCRATCH(memory);
    V* sums = memory.get<V>(2 * probability_cap(n) * MAX_COUNT);
    V* listed_sums = sums + probability_cap(n) * MAX_COUNT;
    Keys<M>&keys = w_.shared, &listed = w_.listed;
    int count = keys.panel_count(p);
    i64 rows = (n - 1) * lanes_ + heads;
    if (keys.n) product<M>((u32*)w_.probability.memory, probability_cap(n), rows, keys.panel(p), count, keys.steps(), sums, true,
                           ahead(keys.n / STRIDE + 1 + p, tiles_of(rows, count) * keys.steps()));
    if (listed.n) {
      i64 place = part_.size == 1 ? 0 : p;
      listed.lay_values(p, place);
      product<M>((u32*)w_.listed_probability.memory, probability_cap(1), heads, listed.panel(place), count, listed.steps(), listed_sums);
    }
    for (i64 i = 0; i < n; i++)
      for (i64 h = 0; h < heads; h++) {
        float factor = 1.0f / ((const float*)w_.totals.memory)[i * lanes_ + h];
        for (int j = 0; j < count; j++) {
          V value = keys.n ? sums[(i * lanes_ + h) * count + j] : V{};
          if (listed.n) value += listed_sums[h * count + j];
          i64 channel = p * MAX_LANES + j * VL, at = ((t + i) * a_.H + head + h) * a_.D + channel;
          if (a_.dtype == BFLOAT16) store_n((bf16*)a_.out + at, value * factor, a_.D - channel);
          else store_n((float*)a_.out + at, value * factor, a_.D - channel);
        }
      }
  }
};

template <class M> void attention(const Attention& a, int threads) {
  static thread_local Workspace<M> own;
  SCRATCH(block_memory);
  Block* blocks = block_memory.get<Block>(a.T);
  i64 count = cut_blocks(a, blocks);
  if (count >= 2 * threads) {
    parallel(threads, count, [&](i64 i) {
      Attender<M>(a, own, Part{0, 1}, i + threads < count ? blocks + i + threads : nullptr).block(blocks[i]);
    });
  } else {
    Workspace<M>& shared = own;
    together(threads, [&](Part part) {
      Attender<M> attender(a, shared, part);
      for (i64 i = 0; i < count; i++) attender.block(blocks[i]);
    });
  }
}

bool in_pairs(int q_dtype, int row_dtype) { return SG_PAIRS && q_dtype == BFLOAT16 && row_dtype == BFLOAT16; }

}  // namespace

// See `reference.py`; the pool's pointers are null without compressed rows, `picks` null when all visible rows are attended.
extern "C" void sg_attention(const void* q, int dtype, i64 T, i64 H, i64 D, const void* window, int page_dtype, i64 window_rows,
                             const i32* window_table, i64 window_cols, const i32* seq, const i32* lo, const i32* hi,
                             const float* sink, float scale, i64 window_width, const void* pool, i64 pool_rows,
                             const i32* pool_table, i64 pool_cols, const i32* visible, const i32* picks, i64 X, i64 pool_width,
                             void* out, int threads) {
  Pages near{(const char*)window, window_table, window_rows, window_cols, D, page_dtype};
  Pages far{(const char*)pool, pool_table, pool_rows, pool_cols, D, page_dtype};
  Attention a{q, dtype, T, H, D, near, far, seq, lo, hi, visible, picks, X, window_width, pool_width, sink, scale, out};
#if SG_PAIRS
  if (in_pairs(dtype, page_dtype)) return attention<Pairs>(a, threads);
#endif
  attention<Floats>(a, threads);
}

namespace {

struct Index {
  const void* q;        // [T, N, I]
  const void* weights;  // [T, N]
  int q_dtype, weight_dtype;
  i64 T, N, I;
  Pages keys;
  const i32 *seq, *visible;
  const i32* blocks;  // [T, Y] blocks of entries that may be picked, -1 = none; null: any entry
  i64 Y, block_size, X, max_visible;
  bool stepwise;
  i32* picks;  // [T, X]
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
    float w = x.weight_dtype == BFLOAT16 ? widen1(((const bf16*)x.weights)[t * x.N + n]) : ((const float*)x.weights)[t * x.N + n];
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

// The X best candidates, ties to the lowest entry, ascending; -inf is never picked. Without scores all are taken.
void pick_best(const Index& x, i64 t, const float* scores) {
  SCRATCH(memory);
  i32* entries = memory.get<i32>(3 * x.seen(t));
  u32 *rank = (u32*)entries + x.seen(t), *order = rank + x.seen(t);
  i32* picks = x.picks + t * x.X;
  i64 n = candidates(x, t, entries), above = 0, count = 0;
  const u32 NEVER = 0x007fffff;  // what -inf becomes
  for (i64 i = 0; i < n; i++) {
    u32 bits = scores ? load<u32>(scores + entries[i]) : 0;
    bits = bits == 0x80000000u ? 0 : bits;  // the two zeros are equal
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
    picks[count++] = entries[i];
  }
  std::fill(picks + count, picks + x.X, -1);
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
        const char* row = x.keys.row(x.seq[start], p * MAX_LANES + i);
        for (i64 word = 0; word < words; word += VL) store(rows + i * words + word, row_words<M>(row, x.keys.dtype, word, x.I));
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

extern "C" void sg_index_topk(const void* q, int q_dtype, const void* weights, int weight_dtype, i64 T, i64 N, i64 I, const void* keys,
                              int key_dtype, i64 page_rows, const i32* table, i64 table_cols, const i32* seq, const i32* visible,
                              const i32* blocks, i64 Y, i64 block_size, i64 X, i64 max_visible, int stepwise, i32* picks,
                              int threads) {
  Pages pages{(const char*)keys, table, page_rows, table_cols, I, key_dtype};
  Index x{q, weights, q_dtype, weight_dtype, T, N, I, pages, seq, visible, blocks, Y, block_size, X, max_visible, stepwise != 0, picks};
#if SG_PAIRS
  if (in_pairs(q_dtype, key_dtype)) return index_topk<Pairs>(x, threads);
#endif
  index_topk<Floats>(x, threads);
}
