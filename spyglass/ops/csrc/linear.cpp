// One matrix, or the blocks of a block-diagonal one, times rows of activations.
#include "rows.h"

#if defined(__GLIBC__)
#include <malloc.h>
#endif

template <class M, int F>
static void linear_few(const Weight& w, const Rows& x, i64 T, i64 groups, const Quant& q, const Output& out, int threads) {
  SCRATCH(prepared);
  i64 words = words_of<M, F>(w.cols), rows = w.rows / groups, task_rows = 64;
  with_few(T, [&](auto few) {
    constexpr int N = few.value;
    u32* memory = prepared.get<u32>(groups * N * words);
    for (i64 g = 0; g < groups; g++)
      for (i64 t = 0; t < N; t++) {
        u32* row = memory + (g * N + t) * words;
        if (t < T) prepare_row<M>(x, t * groups + g, w.cols, words, q, row), arrange<M, F>(row, words);
        else memset(row, 0, words * 4);
      }
    while (task_rows * threads * 8 < w.rows && task_rows < 1024) task_rows *= 2;
    i64 tasks = (rows + task_rows - 1) / task_rows;
    parallel(w.rows * w.row_bytes() < 32768 ? 1 : threads, tasks * groups, [&](i64 task) {
      SCRATCH(scales);
      Factors<M> factors(w, scales.get<typename M::Factor>(Factors<M>::need(w.cols)));
      i64 g = task / tasks, first = g * rows + task % tasks * task_rows;
      i64 stop = first + task_rows < (g + 1) * rows ? first + task_rows : (g + 1) * rows;
      dot_rows<M, F, N>(w, first, stop, factors, (const V*)(memory + g * N * words), words / VL,
                        [&](i64 row, int t, float value) {
                          if (t >= T) return;
                          out.largest ? out.largest->take(t, row, value) : out.put_one(t, row, value);
                        });
    });
  });
}

#if SG_TILES
// Up to MAX_LANES rows of x: the weight is decoded on its way into the product.
template <int F>
static void linear_tiled(const Weight& w, const Rows& x, i64 T, i64 groups, const Quant& q, const Output& out, int threads) {
  SCRATCH(packed);
  const int count = count_of(T);
  i64 words = words_of<Pairs, F>(w.cols), rows = w.rows / groups, task_rows = ROW_BLOCK, size = count * VL * words;
  u32* lanes = packed.get<u32>(groups * size);
  parallel(T * w.cols < 65536 ? 1 : threads, groups, [&](i64 g) {
    Rows part{(const char*)x.x + g * x.stride * (x.dtype == FLOAT32 ? 4 : 2), x.stride * groups, x.dtype};
    pack_panel<Pairs, F>(part, nullptr, 0, T, w.cols, words, q, lanes + g * size);
  });
  while (task_rows * threads * 8 < w.rows && task_rows < 1024) task_rows *= 2;
  i64 tasks = (rows + task_rows - 1) / task_rows;
  parallel(w.rows * w.row_bytes() < 32768 ? 1 : threads, tasks * groups, [&](i64 task) {
    V c[(ROW_BLOCK + OVERSHOOT) * MAX_COUNT];
    i64 g = task / tasks, start = g * rows + task % tasks * task_rows;
    i64 end = start + task_rows < (g + 1) * rows ? start + task_rows : (g + 1) * rows;
    for (i64 first = start; first < end; first += ROW_BLOCK) {
      i64 n = end - first < ROW_BLOCK ? end - first : ROW_BLOCK;
      tiled_rows<F>(w, first, n, end - first - n, (const V*)(lanes + g * size), count, words, c);
      if (out.largest) out.largest->take_lanes(0, c, n, count, first);
      else turn_out(c, n, count, 0, T, first, out);
    }
    if (out.past_caches) settle();
  });
}
#endif

template <class M, int F>
static void linear_many(const Weight& w, const Rows& x, i64 T, i64 groups, const Quant& q, const Output& out, int threads) {
  SCRATCH(packed);
  i64 words = words_of<M, F>(w.cols), rows = w.rows / groups, panels = (T + MAX_LANES - 1) / MAX_LANES;
  u32* lanes = packed.get<u32>(groups * panels * MAX_LANES * words);
  auto panel_of = [&](i64 g, i64 p) { return lanes + (g * panels + p) * MAX_LANES * words; };
  auto size_of = [&](i64 p) { return T - p * MAX_LANES < MAX_LANES ? T - p * MAX_LANES : MAX_LANES; };
  parallel(threads, groups * panels, [&](i64 task) {
    i64 g = task / panels, p = task % panels;
    Rows part{(const char*)x.x + g * x.stride * (x.dtype == FLOAT32 ? 4 : 2), x.stride * groups, x.dtype};
    pack_panel<M, F>(part, nullptr, p * MAX_LANES, size_of(p), w.cols, words, q, panel_of(g, p));
  });
  // one panel takes a few rows at a time, which stay in the nearest cache; their successors come while they are multiplied
  i64 step = panels == 1 ? NEAR_ROWS : ROW_BLOCK, task_rows = ROW_BLOCK;
  while (task_rows * threads * 8 < w.rows && task_rows < 1024) task_rows *= 2;
  i64 tasks = (rows + task_rows - 1) / task_rows;
  parallel(threads, tasks * groups, [&](i64 task) {
    SCRATCH(scales);
    SCRATCH(decoded);
    SCRATCH(sums);
    Factors<M> factors(w, scales.get<typename M::Factor>(Factors<M>::need(w.cols)));
    u32* block = decoded.get<u32>((words + KB - 1) / KB * ROW_BLOCK * LDW);
    V* c = sums.get<V>((ROW_BLOCK + OVERSHOOT) * MAX_COUNT);
    i64 g = task / tasks, start = g * rows + task % tasks * task_rows;
    i64 end = start + task_rows < (g + 1) * rows ? start + task_rows : (g + 1) * rows;
    for (i64 first = start; first < end; first += ROW_BLOCK) {
      i64 n = end - first < ROW_BLOCK ? end - first : ROW_BLOCK;
      for (i64 r = 0; r < n; r += step) {
        i64 m = n - r < step ? n - r : step, next = first + r + m;
        const bool as_it_is = M::per_word == 2 && F == BF16 && m == NEAR_ROWS && words * 2 == w.cols;  // whole tiles of words
        if (!as_it_is) decode_rows<M, F>(w, first + r, m, factors, block, step);
        for (i64 p = 0; p < panels; p++) {
          int count = count_of(size_of(p));
          Ahead ahead;
          if (p == 0 && next < end) ahead = Ahead{w.data + next * w.row_bytes(), m * w.row_bytes() / (tiles_of(m, count) * words)};
          if (as_it_is) product<M, 0>((const u32*)(w.data + (first + r) * w.row_bytes()), words, m, panel_of(g, p), count, words, c + r * count, true, ahead);
          else product<M>(block, step, m, panel_of(g, p), count, words, c + r * count, true, ahead);
          if (r + step < n) continue;
          if (out.largest) out.largest->take_lanes(p * MAX_LANES, c, n, count, first);
          else turn_out(c, n, count, p * MAX_LANES, size_of(p), first, out);
        }
      }
    }
    if (out.past_caches) settle();
  });
}

// Rows at a time, so that scratch for packed activations stays below about 64 MB.
static i64 rows_at_once(i64 cols) { return cols <= 4096 ? 8192 : 8192 * 4096 / cols / MAX_LANES * MAX_LANES + MAX_LANES; }

void linear(const Weight& w, Rows x, i64 T, i64 groups, const Quant& q, Output out, int threads) {
  with_format(w, fits_pairs(w, x.dtype, q), [&](auto words, auto format) {
    typedef decltype(words) M;
    constexpr int F = format.value;
#if SG_TILES
    if constexpr (ON_TILES<M>)
      if (T <= MAX_LANES) return linear_tiled<F>(w, x, T, groups, q, out, threads);
#endif
    if constexpr (!ON_TILES<M>)
      if (T <= FEW) return linear_few<M, F>(w, x, T, groups, q, out, threads);
    i64 step = rows_at_once(w.cols * groups);
    for (i64 t = 0; t < T; t += step) {
      Rows part{(const char*)x.x + t * groups * x.stride * (x.dtype == FLOAT32 ? 4 : 2), x.stride, x.dtype};
      Output to = out;
      to.out = (char*)out.out + t * out.stride * (out.dtype == FLOAT32 ? 4 : 2);
      if (out.addend) to.addend = out.addend + t * out.stride;
      linear_many<M, F>(w, part, T - t < step ? T - t : step, groups, q, to, threads);
    }
  });
}

// Activations are freed and asked for again in every layer. By default blocks above 32 MB go back to the system each time,
// and their fresh pages cost a sixth of a long prompt; keep up to 256 MB instead.
extern "C" void sg_keep_memory() {
#if defined(__GLIBC__)
  mallopt(M_MMAP_THRESHOLD, 256 << 20);
  mallopt(M_TRIM_THRESHOLD, 256 << 20);
#endif
}

constexpr i64 PAST_CACHES = 8 << 20;  // bytes of fp32 output, such as the logits of 32 rows

// x [T, groups, cols] -> out [T, rows]; with groups > 1 row block g of the weight reads group g of x.
extern "C" void sg_linear(const void* x, int x_dtype, i64 T, i64 groups, const void* data, const void* scale, int format,
                          int scale_kind, i64 rows, i64 cols, int block_rows, int block_cols, int element, int block,
                          int e4m3_scale, const float* addend, const float* bias, void* out, int out_dtype, int threads) {
  Weight w{(const u8*)data, (const u8*)scale, rows, cols, format, scale_kind, block_rows, block_cols};
  linear(w, Rows{x, cols, x_dtype}, T, groups, Quant{element, block, e4m3_scale, e4m3_scale && x_dtype == BFLOAT16},
         Output{out, rows, out_dtype, addend, bias, T * rows * 4 > PAST_CACHES}, threads);
}

// The largest of the fp32 products of each row of x [T, cols] with the rows of the weight that `skip` [rows] does not name,
// in values [T], and their numbers in places [T].
extern "C" void sg_linear_argmax(const void* x, int x_dtype, i64 T, const void* data, const void* scale, int format, int scale_kind,
                                  i64 rows, i64 cols, int block_rows, int block_cols, int element, int block, int e4m3_scale,
                                  const u8* skip, float* values, i64* places, int threads) {
  SCRATCH(memory);
  Weight w{(const u8*)data, (const u8*)scale, rows, cols, format, scale_kind, block_rows, block_cols};
  i64 step = rows_at_once(cols);
  for (i64 t = 0; t < T; t += step) {
    i64 n = T - t < step ? T - t : step, width = (n + MAX_LANES - 1) / MAX_LANES * MAX_LANES;
    float* kept = memory.get<float>(2 * threads * width);
    Largest largest{skip, width, kept, kept + threads * width};
    largest.begin(threads);
    Output out{nullptr, rows, FLOAT32, nullptr, nullptr, false, &largest};
    Rows part{(const char*)x + t * cols * (x_dtype == FLOAT32 ? 4 : 2), cols, x_dtype};
    linear(w, part, n, 1, Quant{element, block, e4m3_scale, e4m3_scale && x_dtype == BFLOAT16}, out, threads);
    for (i64 i = 0; i < n; i++) {
      i64 best = i;
      for (i64 at = i + width; at < threads * width; at += width) {
        bool same = kept[at] == kept[best] || (kept[at] != kept[at] && kept[best] != kept[best]);
        if (same ? largest.places[at] < largest.places[best] : Largest::beats(splat(kept[at]), splat(kept[best]))[0]) best = at;
      }
      values[t + i] = kept[best], places[t + i] = (i64)largest.places[best];
    }
  }
}

ON_TAPE(sg_linear)
ON_TAPE(sg_linear_argmax)
