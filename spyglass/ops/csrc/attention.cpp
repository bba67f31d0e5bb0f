// Attention of one latent row per token, key and value at once.
//
// Queries that follow one another share their window rows, decoded once. Scores are the product of key rows with the heads of
// one query in lanes, so that softmax runs lane by lane over keys and nothing is ever summed across lanes; the output is the
// product of probability rows (one per head) with value lanes, in which neighbouring keys form a word. A query that shares
// nothing is `Single`.
#include <algorithm>

#include "pages.h"

namespace {

constexpr i64 QUERIES = 16;  // that share one set of window rows
constexpr i64 ALONE = 1 << 15;  // numbers that one thread decodes faster than two can meet
constexpr i64 STRIDE = 48;   // key rows are shared out in multiples of every tile height

struct Attention {
  const void* q;  // [T, H, D]
  int dtype;
  i64 T, H, D;
  Pages window, pool;
  const i32 *seq, *lo, *hi, *visible, *topk_indices;  // topk_indices [T, X]
  i64 X, window_width, pool_width;
  const float* sink;
  float scale;
  void* out;

  i64 last(i64 t) const { return std::min<i64>(hi[t], lo[t] + window_width - 1); }
  // Compressed rows of query t when they are simply the first ones; -1 when they have to be listed.
  i64 first_rows(i64 t) const {
    if (!pool.data) return 0;
    if (!topk_indices) return std::min<i64>(visible[t], pool_width);
    const i32* pick = topk_indices + t * X;
    i64 n = 0;
    while (n < X && pick[n] == n && n < visible[t]) n++;
    for (i64 i = n; i < X; i++)
      if (pick[i] >= 0 && pick[i] < visible[t]) return -1;
    return n;
  }
};

// A list of rows, laid out as keys (Rows) and as values (Lanes of channels; a word holds M::per_word keys).
template <class M> struct Keys {
  Scratch list, keys, values, numbers;
  const char** at = nullptr;
  i64 n = 0, cap = 0, words = 0, D = 0;
  int dtype = 0;
  u32 *key_rows = nullptr, *value_lanes = nullptr;

  void reserve(i64 most, const RowForm& form) {
    D = form.D, dtype = form.stored() ? sizeof(typename M::Element) == 2 : form.dtype, words = row_size<M>(D);
    if (form.stored()) numbers.get<u32>(most * words);
    at = list.get<const char*>(most + 2);
    cap = (most + STRIDE) / STRIDE * STRIDE + STRIDE;
    key_rows = keys.template get<u32>((words + KB - 1) / KB * cap * LDW);
    value_lanes = values.template get<u32>((D + MAX_LANES - 1) / MAX_LANES * MAX_LANES * (most + 2));
  }
  i64 steps() const { return (n + M::per_word - 1) / M::per_word; }
  // Codes become numbers, which the list has instead: the first `near` rows are of the window. Every thread does its share.
  void decode(const Attention& a, i64 near, Part part) {
    if (!a.window.form.stored()) return;
    for (i64 i = part.rank; i < n; i += part.size) {
      if (!at[i]) continue;
      u32* out = (u32*)numbers.memory + i * words;
      read_row<M>(at[i], i < near ? a.window.form : a.pool.form, words, out);
      at[i] = (const char*)out;
    }
    part.barrier();
  }
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

// Consecutive queries of one sequence, padding rows apart: window positions base .. base + width - 1, then `pooled` compressed rows.
struct Block {
  i64 first, n, base, width, pooled;
};

i64 cut_blocks(const Attention& a, Block* blocks) {
  i64 count = 0;
  for (i64 t = 0; t < a.T;) {
    Block b{t, 0, 0, 0, 0};
    for (; t < a.T && b.n < QUERIES && a.seq[t] == a.seq[b.first]; t++, b.n++) {
      i64 lo = a.lo[t], hi = a.last(t);
      if (b.n && (lo <= hi) != (b.width > 0)) break;
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
  Attender(const Attention& a, Workspace<M>& w, Part part) : a_(a), w_(w), part_(part) {
    heads_ = std::min<i64>(a.H, MAX_LANES), vectors_ = (heads_ + VL - 1) / VL, lanes_ = vectors_ * VL;
  }

  void block(const Block& b) {
    Keys<M>& keys = w_.shared;
    if (part_.rank == 0) list_shared(b);
    part_.barrier();
    keys.decode(a_, b.width, part_);
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
  i64 heads_, vectors_, lanes_;  // of one query at a time

  void list_shared(const Block& b) {
    Keys<M>& keys = w_.shared;
    keys.reserve(b.width + b.pooled, a_.window.form);
    keys.n = b.width + b.pooled;
    std::fill(keys.at, keys.at + keys.n, nullptr);  // a position that no query sees may hold anything
    for (i64 t = b.first; t < b.first + b.n; t++)
      for (i64 position = a_.lo[t]; position <= a_.last(t); position++)
        if (!keys.at[position - b.base]) keys.at[position - b.base] = a_.window.row(a_.seq[t], position);
    for (i64 entry = 0; entry < b.pooled; entry++) keys.at[b.width + entry] = a_.pool.row(a_.seq[b.first], entry);
  }

  void list_chosen(i64 t) {
    Keys<M>& keys = w_.listed;
    keys.n = 0;
    if (a_.first_rows(t) >= 0) return;
    keys.reserve(a_.X, a_.pool.form);
    for (i64 i = 0; i < a_.X; i++) {
      i64 entry = a_.topk_indices[t * a_.X + i];
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
      list_chosen(t);
      pack_queries(t, n, head, heads);
      w_.scores.template get<V>((keys.n + STRIDE) * n * vectors_);
      w_.listed_scores.template get<V>((listed.n + STRIDE) * vectors_);
      w_.probability.template get<u32>((keys.steps() / KB + 1) * probability_cap(n) * LDW);
      w_.listed_probability.template get<u32>((listed.steps() / KB + 1) * probability_cap(1) * LDW);
      w_.totals.template get<V>(MAX_COUNT);
    }
    part_.barrier();
    listed.decode(a_, 0, part_);
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
      product<M>(keys.key_rows + place * LDW, keys.cap, stop - i, (const u32*)w_.q_lanes.memory, count, keys.words, scores + i * count);
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
    if (keys.n) product<M>((u32*)w_.probability.memory, probability_cap(n), rows, keys.panel(p), count, keys.steps(), sums);
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

// The rows of one query, as words: where they lie, or copies of those that do not lie in memory as such.
struct Listed {
  static constexpr i64 MORE = 4;  // the last one comes some times more, as `KEYS` are multiplied at a time
  const u32** rows = nullptr;
  i64 n = 0, near = 0;  // of them in the window
  bool copied = false;

  static i64 most(const Attention& a) { return a.window_width + (a.pool.data ? std::max(a.pool_width, a.X) : 0) + MORE; }
  template <class M> static Listed of(const Attention& a, i64 t, const u32** memory) {
    Listed found;
    found.rows = memory;
    for (i64 position = a.lo[t]; position <= a.last(t); position++) found.rows[found.n++] = (const u32*)a.window.row(a.seq[t], position);
    found.near = found.n;
    if (a.pool.data)
      for (i64 i = 0; i < (a.topk_indices ? a.X : a.pool_width); i++) {
        i64 entry = a.topk_indices ? a.topk_indices[t * a.X + i] : i;
        if (entry >= 0 && entry < a.visible[t]) found.rows[found.n++] = (const u32*)a.pool.row(a.seq[t], entry);
      }
    const RowForm& form = a.window.form;
    const i64 size = form.dtype == BFLOAT16 ? 2 : 4;
    found.copied = form.stored() || size * M::per_word != 4 || size * a.D != row_size<M>(a.D) * 4;
    if (!found.copied) found.end();
    return found;
  }
  // Rows first .. stop to `out`, which has room for all.
  template <class M> void copy(const Attention& a, u32* out, i64 first, i64 stop) {
    const i64 words = row_size<M>(a.D);
    if (!copied) return;
    for (i64 i = first; i < stop; i++) {
      read_row<M>((const char*)rows[i], i < near ? a.window.form : a.pool.form, words, out + i * words);
      rows[i] = out + i * words;
    }
    if (stop == n) end();
  }
  void end() {
    for (i64 i = 0; n && i < MORE; i++) rows[n + i] = rows[n - 1];
  }
};

// Attention of one query, as in decoding. Vectors run along the channels of rows that are read where they lie: scores are
// summed across lanes at the end, outputs are rows times probabilities.
template <class M> class Single {
 public:
  explicit Single(const Attention& a) : a_(a), words_(row_size<M>(a.D)) {}

  // Heads first .. first + n of query t; what query `next` (-1: none) will read is fetched meanwhile. `found`: its rows.
  void heads(i64 t, i64 first, i64 n, i64 next, const Listed* found) {
    SCRATCH(q_memory);
    SCRATCH(score_memory);
    SCRATCH(probability_memory);
    SCRATCH(factor_memory);
    SCRATCH(value_memory);
    SCRATCH(list_memory);
    SCRATCH(copies);
    Listed own;
    if (!found) {
      own = Listed::of<M>(a_, t, list_memory.get<const u32*>(Listed::most(a_)));
      own.copy<M>(a_, copies.get<u32>(own.copied ? own.n * words_ : 0), 0, own.n);
      found = &own;
    }
    rows_ = found->rows, n_ = found->n, next_ = next, tiles_ = (n + HEADS - 1) / HEADS;
    cap_ = (n_ + VL - 1) / VL * VL;
    q_ = q_memory.get<u32>(tiles_ * HEADS * words_);
    scores_ = score_memory.get<float>(tiles_ * HEADS * cap_);
    probability_ = probability_memory.get<u32>(tiles_ * HEADS * cap_ / M::per_word);
    factors_ = factor_memory.get<float>(n);
    values_ = value_memory.get<V>(2 * (n_ + 1));
    for (i64 h = 0; h < tiles_ * HEADS; h++) {
      if (h < n) prepare_row<M>(Rows{a_.q, a_.D, a_.dtype}, t * a_.H + first + h, a_.D, words_, Quant{NONE, 0, 0}, q_ + h * words_);
      else memset(q_ + h * words_, 0, words_ * 4);
    }
    for (i64 key = 0; key < n_; key += KEYS)
      for (i64 tile = 0; tile < tiles_; tile++) dots(key, tile);
    for (i64 h = 0; h < n; h++) factors_[h] = softmax(h, a_.sink[first + h]);
    for (i64 word = 0; word < words_; word += 2 * VL)
      words_ - word > VL ? outputs<2>(t * a_.H + first, n, word) : outputs<1>(t * a_.H + first, n, word);
  }
  static constexpr i64 HEADS = 4, KEYS = 4;  // that are multiplied at a time

 private:
  const Attention& a_;
  i64 words_, n_ = 0, cap_ = 0, tiles_ = 0, next_ = -1, calls_ = 0;
  const u32** rows_ = nullptr;
  u32 *q_ = nullptr, *probability_ = nullptr;  // [heads][words], [heads][keys]
  float *scores_ = nullptr, *factors_ = nullptr;  // [heads][keys], [heads]
  V* values_ = nullptr;

  // The share of the next query's rows that is fetched in one call of `dots` or `output`, as it has `steps` steps.
  Ahead ahead(i64 steps) {
    if (next_ < 0 || !n_) return Ahead();
    const i64 seq = a_.seq[next_], width = a_.last(next_) - a_.lo[next_] + 1;
    const i64 pooled = a_.pool.data && !a_.topk_indices ? std::min<i64>(a_.visible[next_], a_.pool_width) : 0;
    const i64 calls = tiles_ * ((n_ + KEYS - 1) / KEYS + (words_ + 2 * VL - 1) / (2 * VL)), row = (width + pooled) * calls_++ / calls;
    const char* at = row < width ? a_.window.row(seq, a_.lo[next_] + row) : a_.pool.row(seq, row - width);
    return Ahead{(const u8*)at, (width + pooled) * a_.window.form.bytes / (calls * steps)};
  }
  static INLINE void fetch(const Ahead& next, i64 step) {
    __builtin_prefetch(next.at + next.bytes * step, 0, 2);
    __builtin_prefetch(next.at + next.bytes * step + next.bytes / 2, 0, 2);
  }

  // Scores of KEYS rows with the heads of one tile.
  void dots(i64 key, i64 tile) {
    const u32 *row[KEYS], *q = q_ + tile * HEADS * words_;
    for (i64 i = 0; i < KEYS; i++) row[i] = rows_[key + i];
    const Ahead next = ahead(words_ / VL);
    V sums[HEADS][KEYS] = {};
    for (i64 word = 0; word < words_; word += VL) {
      V x[KEYS];
#pragma GCC unroll 4
      for (int i = 0; i < KEYS; i++) x[i] = load<V>(row[i] + word);
      fetch(next, word / VL);
#pragma GCC unroll 4
      for (int h = 0; h < HEADS; h++) {
        V value = load<V>(q + h * words_ + word);
#pragma GCC unroll 4
        for (int i = 0; i < KEYS; i++) sums[h][i] = M::madd(sums[h][i], value, x[i]);
      }
    }
#pragma GCC unroll 4
    for (int h = 0; h < HEADS; h++) {
      V four = sum_four(sums[h][0], sums[h][1], sums[h][2], sums[h][3]);
      memcpy(scores_ + (tile * HEADS + h) * cap_ + key, &four, 4 * KEYS);
    }
  }

  // Probabilities of one head, rounded like q; returns what their sum with the sink's is divided by.
  float softmax(i64 head, float sink) {
    typedef typename M::Element E;
    float* score = scores_ + head * cap_;
    E* p = (E*)probability_ + head * cap_;
    std::fill(score + n_, score + cap_, -__builtin_inff());
    V most = splat(-__builtin_inff()), total = {};
    for (i64 i = 0; i < n_; i += VL) most = vmax(load_v(score + i), most);
    most = vmax(top(most) * a_.scale, splat(-1e30f));
    for (i64 i = 0; i < n_; i += VL) {
      V value = vexp(load_v(score + i) * a_.scale - most);
      total += value;
      store_v(p + i, a_.dtype == BFLOAT16 ? round_bf16(value) : value);
    }
    return 1.0f / (sum(total) + vexp(sink - most)[0]);
  }

  template <int N> void outputs(i64 row, i64 n, i64 word) {
    lay<N>(word);
    for (i64 h = 0; h < n; h += HEADS) output<N>(h / HEADS, std::min(n - h, HEADS), word, (row + h) * a_.D);
  }

  // N vectors of words of all rows, as `output` reads them again for every head: channels in lanes, M::per_word keys to a word.
  template <int N> void lay(i64 word) {
    constexpr int P = M::per_word;
    for (i64 step = 0; step * P < n_; step++)
#pragma GCC unroll 2
      for (int j = 0; j < N; j++) {
        const u32* row = rows_[step * P] + word + j * VL;
        V* out = values_ + (step * N + j) * P;
#if SG_PAIRS
        if constexpr (P == 2) {
          __m512i a = load<__m512i>(row), b = load<__m512i>(rows_[step * P + 1] + word + j * VL);
          out[0] = (V)_mm512_unpacklo_epi16(a, b), out[1] = (V)_mm512_unpackhi_epi16(a, b);
          continue;
        }
#endif
        out[0] = load<V>(row);
      }
  }

  template <int N> void output(i64 tile, i64 heads, i64 word, i64 at) {
    constexpr int P = M::per_word;
    const u32* p = probability_ + tile * HEADS * cap_ / P;
    const float* factor = factors_ + tile * HEADS;
    const Ahead next = ahead((n_ + P - 1) / P);
    V sums[HEADS][N * P] = {};
    for (i64 step = 0; step * P < n_; step++) {
      fetch(next, step);
#pragma GCC unroll 4
      for (int h = 0; h < HEADS; h++) {
        V weight = (V)splat_bits(p[h * cap_ / P + step]);
#pragma GCC unroll 4
        for (int j = 0; j < N * P; j++) sums[h][j] = M::madd(sums[h][j], weight, values_[step * N * P + j]);
      }
    }
    // interleaving two rows moved their channels four by four
    LANES(lower, lane / 8 * 4 + lane % 4 + (lane & 4 ? VL : 0));
    LANES(upper, lane / 8 * 4 + lane % 4 + (lane & 4 ? VL : 0) + VL / 2);
    for (i64 h = 0; h < heads; h++)
      for (int j = 0; j < N * P; j++) {
        V value = sums[h][j];
        if constexpr (P == 2) value = __builtin_shuffle(sums[h][j & ~1], sums[h][j | 1], j % 2 ? upper : lower);
        value *= factor[h];
        i64 channel = word * P + j * VL;
        if (channel >= a_.D) continue;
        if (a_.dtype == BFLOAT16) store_n((bf16*)a_.out + at + h * a_.D + channel, value, a_.D - channel);
        else store_n((float*)a_.out + at + h * a_.D + channel, value, a_.D - channel);
      }
  }
};

template <class M> void attention(const Attention& a, int threads) {
  static thread_local Workspace<M> own;
  SCRATCH(block_memory);
  SCRATCH(single_memory);
  Block* blocks = block_memory.get<Block>(a.T);
  i64* singles = single_memory.get<i64>(a.T);
  i64 count = cut_blocks(a, blocks), num_singles = 0;
  for (i64 i = 0; i < count; i++)
    if (blocks[i].n == 1) singles[num_singles++] = blocks[i].first;
  count = std::remove_if(blocks, blocks + count, [](const Block& b) { return b.n == 1; }) - blocks;
  // few queries share out their heads
  i64 heads = num_singles < 2 * threads ? Single<M>::HEADS : a.H, parts = (a.H + heads - 1) / heads;
  // and what they read is decoded once
  SCRATCH(found_memory);
  SCRATCH(list_memory);
  SCRATCH(copies);
  Listed* found = nullptr;
  if (parts > 1 && num_singles && a.window.form.stored()) {
    found = found_memory.get<Listed>(num_singles);
    const i64 most = Listed::most(a), words = row_size<M>(a.D), stretches = (most + STRIDE - 1) / STRIDE;
    const u32** lists = list_memory.get<const u32*>(num_singles * most);
    u32* out = copies.get<u32>(num_singles * most * words);
    for (i64 i = 0; i < num_singles; i++) found[i] = Listed::of<M>(a, singles[i], lists + i * most);
    parallel(num_singles * most * a.D < ALONE ? 1 : threads, num_singles * stretches, [&](i64 task) {
      Listed& one = found[task / stretches];
      const i64 first = task % stretches * STRIDE;
      if (first < one.n) one.copy<M>(a, out + task / stretches * most * words, first, std::min(first + STRIDE, one.n));
    });
  }
  parallel(threads, num_singles * parts, [&](i64 task) {
    i64 index = task / parts, head = task % parts * heads;
    i64 next = parts == 1 && index + threads < num_singles ? singles[index + threads] : -1;
    if (next >= 0 && a.lo[next] > a.last(next)) next = -1;
    Single<M>(a).heads(singles[index], head, std::min(heads, a.H - head), next, found ? found + index : nullptr);
  });
  if (count >= 2 * threads) {
    parallel(threads, count, [&](i64 i) { Attender<M>(a, own, Part{0, 1}).block(blocks[i]); });
  } else if (count) {
    Workspace<M>& shared = own;
    together(threads, [&](Part part) {
      Attender<M> attender(a, shared, part);
      for (i64 i = 0; i < count; i++) attender.block(blocks[i]);
    });
  }
}

}  // namespace

// See `reference.py`; the pool's pointers are null without compressed rows, `topk_indices` null when all visible rows are attended.
extern "C" void sg_attention(const void* q, int dtype, i64 T, i64 H, i64 D, const void* window, i64 window_format, i64 window_rows,
                             const i32* window_table, i64 window_cols, const i32* seq, const i32* lo, const i32* hi,
                             const float* sink, float scale, i64 window_width, const void* pool, i64 pool_format, i64 pool_rows,
                             const i32* pool_table, i64 pool_cols, const i32* visible, const i32* topk_indices, i64 X, i64 pool_width,
                             void* out, int threads) {
  Pages near{(const char*)window, window_table, window_rows, window_cols, RowForm(window_format, D)};
  Pages far{(const char*)pool, pool_table, pool_rows, pool_cols, RowForm(pool_format, D)};
  Attention a{q, dtype, T, H, D, near, far, seq, lo, hi, visible, topk_indices, X, window_width, pool_width, sink, scale, out};
#if SG_PAIRS
  if (in_pairs(dtype, near.form)) return attention<Pairs>(a, threads);
#endif
  attention<Floats>(a, threads);
}

ON_TAPE(sg_attention)
