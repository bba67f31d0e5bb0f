// Products of bf16 pairs on the processor's tile unit: 16 rows times 16 lanes times 16 words in one instruction, with the
// layouts of `product`. Included by product.h.
//
// Every sum is one chain over the words in ascending order, however rows and lanes are cut into tiles, so a product has the
// same bits whatever else is multiplied beside it.

struct alignas(64) TileShapes {
  u8 palette, start_row, reserved[14];
  uint16_t bytes[16];
  u8 rows[16];
  constexpr TileShapes() : palette(1), start_row(0), reserved(), bytes(), rows() {
    for (int i = 0; i < 8; i++) bytes[i] = 64, rows[i] = 16;
  }
};
static constexpr TileShapes TILE_SHAPES;

// Tiles are held only inside: a thread without them is cheaper to switch.
struct Tiles {
  Tiles() { _tile_loadconfig(&TILE_SHAPES); }
  ~Tiles() { _tile_release(); }
};

// The compiler's own forms of these do not say that they touch memory.
#define TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t ::)
#define TILE_LOAD(t, p, bytes) __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(p), "r"((i64)(bytes)) : "memory")
#define TILE_STORE(t, p, bytes) __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(p), "r"((i64)(bytes)) : "memory")
#define TILE_ADD(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)

// Sums of R x N tiles (4 x 1, 2 x 2, 1 x 4 and less) in registers 0 to 3; 4 to 7 hold what is multiplied.
template <int R, int N> struct Sums {
  static_assert(R * N <= 4);
  static INLINE void zero() {
    TILE_ZERO(0);
    if constexpr (R * N > 1) TILE_ZERO(1);
    if constexpr (R * N > 2) TILE_ZERO(2);
    if constexpr (R * N > 3) TILE_ZERO(3);
  }
  // c [rows][count vectors]
  static INLINE void load(const V* c, i64 count) {
    auto at = [&](int i) { return c + i / N * 16 * count + i % N; };
    TILE_LOAD(0, at(0), count * 64);
    if constexpr (R * N > 1) TILE_LOAD(1, at(1), count * 64);
    if constexpr (R * N > 2) TILE_LOAD(2, at(2), count * 64);
    if constexpr (R * N > 3) TILE_LOAD(3, at(3), count * 64);
  }
  static INLINE void store(V* c, i64 count) {
    auto at = [&](int i) { return c + i / N * 16 * count + i % N; };
    TILE_STORE(0, at(0), count * 64);
    if constexpr (R * N > 1) TILE_STORE(1, at(1), count * 64);
    if constexpr (R * N > 2) TILE_STORE(2, at(2), count * 64);
    if constexpr (R * N > 3) TILE_STORE(3, at(3), count * 64);
  }
  // rows [R * 16][16 words], `apart` words apart, times lanes [16 words][N of count vectors]
  static INLINE void add(const u32* rows, i64 apart, const V* lanes, i64 count) {
    auto row = [&](int r) { return rows + r * 16 * apart; };
    if constexpr (N == 1) {
      TILE_LOAD(4, lanes, count * 64);
      TILE_LOAD(5, row(0), apart * 4);
      TILE_ADD(0, 5, 4);
      if constexpr (R > 1) {
        TILE_LOAD(6, row(1), apart * 4);
        TILE_ADD(1, 6, 4);
      }
      if constexpr (R > 2) {
        TILE_LOAD(7, row(2), apart * 4);
        TILE_ADD(2, 7, 4);
      }
      if constexpr (R > 3) {
        TILE_LOAD(5, row(3), apart * 4);
        TILE_ADD(3, 5, 4);
      }
    } else if constexpr (R == 1) {
      TILE_LOAD(4, row(0), apart * 4);
      TILE_LOAD(5, lanes, count * 64);
      TILE_ADD(0, 4, 5);
      TILE_LOAD(6, lanes + 1, count * 64);
      TILE_ADD(1, 4, 6);
      if constexpr (N > 2) {
        TILE_LOAD(7, lanes + 2, count * 64);
        TILE_ADD(2, 4, 7);
      }
      if constexpr (N > 3) {
        TILE_LOAD(5, lanes + 3, count * 64);
        TILE_ADD(3, 4, 5);
      }
    } else {
      static_assert(R == 2 && N == 2);
      TILE_LOAD(4, row(0), apart * 4);
      TILE_LOAD(6, lanes, count * 64);
      TILE_ADD(0, 4, 6);
      TILE_LOAD(7, lanes + 1, count * 64);
      TILE_ADD(1, 4, 7);
      TILE_LOAD(5, row(1), apart * 4);
      TILE_ADD(2, 5, 6);
      TILE_ADD(3, 5, 7);
    }
  }
};

// As `product`; `words` is a multiple of 16.
template <i64 LD>
static void tiled_product(const u32* rows, i64 cap, i64 n, const u32* lanes, int count, i64 words, V* c, bool first, Ahead ahead) {
  Tiles tiles;
  const i64 apart = LD ? LD : cap, bytes = ahead.bytes * 16;
  for (i64 word = 0; word < words; word += KB) {
    const i64 stop = words - word < KB ? words - word : KB;
    const u32* block = rows + (LD ? word / KB * cap * LD : word);
    const V* x = (const V*)lanes + word * count;
    auto walk = [&](i64 r, int j, auto height, auto width) __attribute__((always_inline)) {
      typedef Sums<height.value, width.value> S;
      V* to = c + r * count + j;
      if (first && word == 0) S::zero();
      else S::load(to, count);
      for (i64 s = 0; s < stop; s += 16) {
        for (i64 b = 0; b < bytes * height.value * width.value; b += 64) __builtin_prefetch(ahead.at + b);
        ahead.at += bytes * height.value * width.value;
        S::add(block + r * apart + s, apart, x + s * count + j, count);
      }
      S::store(to, count);
    };
    if (count == 1) {
      i64 r = 0;
      for (; n - r > 48; r += 64) walk(r, 0, SIZE(4), SIZE(1));
      for (; n - r > 16; r += 32) walk(r, 0, SIZE(2), SIZE(1));
      for (; r < n; r += 16) walk(r, 0, SIZE(1), SIZE(1));
    } else {
      auto across = [&](i64 r, auto height) {
        for (int j = 0; j + 2 <= count; j += 2) walk(r, j, height, SIZE(2));
        if (count % 2) walk(r, count - 1, height, SIZE(1));
      };
      i64 r = 0;
      for (; n - r > 16; r += 32) across(r, SIZE(2));
      for (; r < n; r += 16) across(r, SIZE(1));
    }
  }
}

// The factors of 8 groups of 32 inputs of a stretch of KB words, `count` of which the row has; remembered while rows share
// them. As `Pairs::factor`.
struct StretchFactors {
  const Weight& w;
  i64 first, count, width;  // groups; groups that a scale covers
  i64 rows_left = 0;
  alignas(16) Pairs::Factor at[8];
  StretchFactors(const Weight& weight, i64 word, i64 row) : w(weight), first(word * 2 / GROUP), width(weight.block_cols / GROUP) {
    count = (w.cols + GROUP - 1) / GROUP - first;
    count = count < 0 ? 0 : count < 8 ? count : 8;  // 0 behind the last stretch
    begin(row);
  }
  void begin(i64 row) { next = w.scale + row / w.block_rows * w.scale_cols() + first / width, rows_left = 0, ahead = w.block_rows - row % w.block_rows; }
  // Of the row behind the last one that was asked for.
  const Pairs::Factor* of_next() {
    if (rows_left--) return at;
    u8 bytes[8] = {};
    if (width == 1) {
      if (count == 8) memcpy(bytes, next, 8);
      else memcpy(bytes, next, count);
    } else {
      for (i64 g = 0, column = 0, left = width - first % width; g < count; g++) {
        bytes[g] = next[column];
        if (--left == 0) column++, left = width;
      }
    }
    next += w.scale_cols(), rows_left = ahead - 1, ahead = w.block_rows;
    __m128i exponent = _mm_sub_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)bytes)), _mm_set1_epi16(127));
    exponent = _mm_min_epi16(_mm_max_epi16(exponent, _mm_set1_epi16(-117)), _mm_set1_epi16(119));
    _mm_store_si128((__m128i*)at, _mm_slli_epi16(exponent, 7));
    return at;
  }

 private:
  const u8* next;
  i64 ahead;
};

// c [n][count vectors] = rows first .. first + n (64 at most) of the weight times lanes. The weight is decoded a stretch of KB
// words of a few rows at a time, which stays in the nearest cache, while the stretch before is multiplied. `after` more rows
// come behind these, and are fetched.
template <int F>
static void tiled_rows(const Weight& w, i64 first, i64 n, i64 after, const V* lanes, int count, i64 words, V* c) {
  typedef Chunk<Pairs, F> C;
  constexpr i64 WORDS = C::VECS * VL, STEPS = KB / 16;
  alignas(64) static thread_local u32 memory[2][32 * LDW];
  u32* const decoded[2] = {memory[0], memory[1]};
  const i64 row_bytes = w.row_bytes();
  Tiles tiles;
  auto walk = [&](i64 r, auto height, auto width) __attribute__((always_inline)) {
    typedef Sums<height.value, width.value> S;
    constexpr i64 ROWS = height.value * 16, SHARE = ROWS / STEPS;  // rows that are decoded beside a step
    const i64 own = n - r < ROWS ? n - r : ROWS;
    const u8* const start = w.data + (first + r) * row_bytes;
    // rows from .. to of the stretch at `word`
    auto decode = [&](StretchFactors& factors, i64 word, i64 from, i64 to) __attribute__((always_inline)) {
      const i64 stop = words - word < KB ? words - word : KB, whole = w.cols / 2 - word, skipped = word / WORDS * C::BYTES;
      // the next stretch of the same rows, or the first one of the rows behind them
      const i64 next = word + KB < words ? KB / WORDS * C::BYTES : after + n - r > ROWS ? ROWS * row_bytes - skipped : 0;
      for (i64 row = from; row < to && row < own; row++) {
        const u8* p = start + row * row_bytes + skipped;
        u32* out = decoded[word / KB % 2] + row * LDW;
        const Pairs::Factor* factor = F == BF16 ? nullptr : factors.of_next();
        auto step = [&](i64 s, const u8* p) __attribute__((always_inline)) {
          V value[C::VECS];
          C::decode(p, factor + s * 2 / GROUP, value);
#pragma GCC unroll 4
          for (int v = 0; v < C::VECS; v++) store(out + s + v * VL, value[v]);
        };
        i64 s = 0;
        for (; s < stop && s + WORDS <= whole; s += WORDS) __builtin_prefetch(p + s / WORDS * C::BYTES + next, 0, 2), step(s, p + s / WORDS * C::BYTES);
        if (s < stop) {
          u8 last[C::BYTES] = {};
          memcpy(last, p + s / WORDS * C::BYTES, row_bytes - skipped - s / WORDS * C::BYTES);
          step(s, last);
        }
      }
    };
    S::zero();
    StretchFactors factors(w, 0, first + r);
    decode(factors, 0, 0, ROWS);
    for (i64 word = 0; word < words; word += KB) {
      const i64 stop = words - word < KB ? words - word : KB;
      StretchFactors factors(w, word + KB, first + r);
      const V* x = lanes + word * count;
      for (i64 s = 0; s < stop; s += 16) {
        S::add(decoded[word / KB % 2] + s, LDW, x + s * count, count);
        if (word + KB < words) decode(factors, word + KB, s / 16 * SHARE, (s / 16 + 1) * SHARE);
      }
    }
    S::store(c + r * count, count);
  };
  for (i64 r = 0; r < n;) {
    auto take = [&](auto height, auto width) { walk(r, height, width), r += height.value * 16; };
    if (count == 1) n - r > 16 ? take(SIZE(2), SIZE(1)) : take(SIZE(1), SIZE(1));
    else if (count == 2) n - r > 16 ? take(SIZE(2), SIZE(2)) : take(SIZE(1), SIZE(2));
    else if (count == 3) take(SIZE(1), SIZE(3));
    else take(SIZE(1), SIZE(4));
  }
}
