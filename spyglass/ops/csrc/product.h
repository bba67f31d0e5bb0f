// Matrix products on 4-byte words: a word is one fp32 number (Floats) or two neighbouring bf16 numbers (Pairs).
//
// Small products (a few rows of x) stream the weight once: `dot` decodes a stretch of each row in registers and multiplies
// it with every row of x. Large ones decode rows once into `Rows` and multiply them with `Lanes`, in which one operand is
// turned so that a vector holds the same word of VL of its rows:
//   Rows:  [word / KB][row, `cap` of them][LDW]     one word is broadcast
//   Lanes: [word][count * VL]                       `count` vectors are loaded
// All sums are fp32. A pair product rounds each of its two additions and takes subnormal inputs as zero.
#pragma once
#include "simd.h"

enum Format { F32, BF16, FP8, FP4 };
enum ScaleKind { NO_SCALE, E8M0, SCALE_F32 };
constexpr int GROUP = 32;  // an expanded scale row has one entry per 32 inputs
constexpr i64 KB = 128, LDW = KB + 16;  // 576-byte rows spread over the sets of the cache
constexpr int MAX_COUNT = VL == 16 ? 4 : 2, MAX_LANES = MAX_COUNT * VL;
constexpr i64 ROW_BLOCK = 64;  // rows whose sums are turned at a time: whole cache lines of the output
constexpr i64 NEAR_ROWS = 16;  // rows decoded at a time for one panel

// One matrix [rows, cols], or a stack of them. Scales [ceil(rows / block_rows), ceil(cols / block_cols)] per matrix.
struct Weight {
  const u8* data;
  const u8* scale;
  i64 rows, cols;
  int format, scale_kind, block_rows, block_cols;
  i64 row_bytes() const { return format == F32 ? 4 * cols : format == BF16 ? 2 * cols : format == FP8 ? cols : cols / 2; }
  i64 scale_cols() const { return (cols + block_cols - 1) / block_cols; }
  Weight part(i64 index) const {
    Weight one = *this;
    one.data += index * rows * row_bytes();
    if (scale_kind) {
      i64 count = (rows + block_rows - 1) / block_rows * scale_cols();
      one.scale += index * count * (scale_kind == E8M0 ? 1 : 4);
    }
    return one;
  }
};

struct Floats {
  static constexpr int per_word = 1;
  typedef float Factor;  // an entry of an expanded scale row
  typedef float Element;
  static INLINE V madd(V acc, V a, V b) { return a * b + acc; }
  static Factor factor(const Weight& w, i64 index) {
    if (w.scale_kind == SCALE_F32) return load<float>(w.scale + 4 * index);
    u8 code = w.scale[index];
    u32 bits = code == 0 ? 0x00400000 : code == 255 ? 0x7fc00000 : (u32)code << 23;
    return load<float>(&bits);
  }
};

struct Pairs;
template <class M> constexpr bool ON_TILES = SG_TILES && std::is_same<M, Pairs>::value;  // products run on the tile unit

// Decoding VL words' worth of inputs at a time: COLS inputs become VECS vectors, scale included, in natural order unless
// `spread` says another.
template <class M, int F> struct Chunk;
// Chunks that also give `values` without scales: in `dot` a scale meets the sum of its group, not its 32 inputs.
template <class M, int F> constexpr bool GROUPED = VL > 4 && (F == FP4 || (F == FP8 && M::per_word == 1));
template <class M, int F> constexpr float UNIT = GROUPED<M, F> && F == FP8 ? 256 : 1;  // such values are this much too small
template <> struct Chunk<Floats, F32> {
  static constexpr int COLS = VL, BYTES = 4 * VL, VECS = 1;
  static INLINE void decode(const u8* p, const float*, V* out) { out[0] = load<V>(p); }
};
template <> struct Chunk<Floats, BF16> {
  static constexpr int COLS = VL, BYTES = 2 * VL, VECS = 1;
  static INLINE void decode(const u8* p, const float*, V* out) { out[0] = widen(load<VH>(p)); }
};
#if defined(__AVX512F__) || defined(__AVX2__)
#include "packed.h"
#else
template <> struct Chunk<Floats, FP8> {
  static constexpr int COLS = VL, BYTES = VL, VECS = 1;
  static INLINE void decode(const u8* p, const float* scale, V* out) {
    VU code = extend(load<VB>(p)), size = code & 0x7f;
    V normal = (V)((size << 20) + (120u << 23));
    V small = __builtin_convertvector((VI)size, V) * 0x1p-9f;  // no subnormal arithmetic, which may be switched off
    V value = (VI)size < 8 ? small : normal;
    value = (VI)size == 127 ? splat(__builtin_nanf("")) : value;
    out[0] = (V)((VU)value | (code & 0x80) << 24) * *scale;
  }
};
template <> struct Chunk<Floats, FP4> {
  static constexpr int COLS = 2 * VL, BYTES = VL, VECS = 2;
  static INLINE V value(VU code) {  // doubled magnitudes 0 1 2 3 4 6 8 12 as nibbles of a constant
    VU twice = (splat_bits(0xC8643210u) >> ((code & 7) << 2)) & 15;
    return (V)((VU)(__builtin_convertvector((VI)twice, V) * 0.5f) | (code & 8) << 28);
  }
  static INLINE void decode(const u8* p, const float* scale, V* out) {
    VU bytes = extend(load<VB>(p));
    V even = value(bytes & 15) * *scale, odd = value(bytes >> 4) * *scale;
    LANES(first, lane / 2 + (lane & 1) * VL);
    LANES(second, lane / 2 + (lane & 1) * VL + VL / 2);
    out[0] = __builtin_shuffle(even, odd, first);
    out[1] = __builtin_shuffle(even, odd, second);
  }
};
#endif

#if SG_PAIRS
struct Pairs {
  static constexpr int per_word = 2;
  typedef int16_t Factor;  // exponent, in the place where bf16 has it
  typedef bf16 Element;
  static INLINE V madd(V acc, V a, V b) { return (V)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b); }
  // Scales of 2^-117 .. 2^119 are exact; native.refuse_scales keeps other ones away, unless all their codes are 0.
  static Factor factor(const Weight& w, i64 index) {
    int exponent = (int)w.scale[index] - 127;
    return (exponent < -117 ? -117 : exponent > 119 ? 119 : exponent) * 128;
  }
  static INLINE V shift(__m512i v, Factor exponent) {  // times a power of two; zero stays zero
    __mmask32 nonzero = _mm512_test_epi16_mask(v, _mm512_set1_epi16(0x7fff));
    return (V)_mm512_mask_add_epi16(v, nonzero, v, _mm512_set1_epi16(exponent));
  }
};
template <> struct Chunk<Pairs, BF16> {
  static constexpr int COLS = 32, BYTES = 64, VECS = 1;
  static INLINE void decode(const u8* p, const Pairs::Factor*, V* out) { out[0] = load<V>(p); }
};
struct alignas(64) E4m3Table {  // low and high byte of the bf16 with the value of an unsigned code
  u8 low[128], high[128];
  constexpr E4m3Table() : low(), high() {
    for (int code = 0; code < 128; code++) {
      int exponent = code >> 3, fraction = code & 7, bits = 0;
      if (exponent) bits = (exponent + 120) << 7 | fraction << 4;
      else if (fraction) bits = (fraction < 2 ? 118 : fraction < 4 ? 119 : 120) << 7 | (fraction == 3 || fraction > 5 ? 64 : 0) | (fraction == 5 || fraction == 7 ? 32 : 0);
      if (code == 127) bits = 0x7fc0;
      low[code] = bits & 255;
      high[code] = bits >> 8;
    }
  }
};
static constexpr E4m3Table TABLE;
template <> struct Chunk<Pairs, FP8> {
  static constexpr int COLS = 64, BYTES = 64, VECS = 2;
  static INLINE void decode(const u8* p, const Pairs::Factor* scale, V* out) {
#if SG_TILES
    // Most stretches hold normal numbers only, whose exponent and fraction move to their place as they are.
    __m512i codes = _mm512_loadu_si512(p);
    if (__builtin_expect(!(_mm512_testn_epi8_mask(codes, _mm512_set1_epi8(0x78)) |
                           _mm512_cmpeq_epi8_mask(_mm512_or_si512(codes, _mm512_set1_epi8((char)0x80)), _mm512_set1_epi8(-1))), 1)) {
      for (int v = 0; v < 2; v++) {
        __m512i wide = _mm512_slli_epi16(_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p + v)), 4);
        wide = _mm512_and_si512(wide, _mm512_set1_epi16((short)0x87f0));
        out[v] = (V)_mm512_add_epi16(wide, _mm512_set1_epi16((short)(scale[v] + (120 << 7))));
      }
      return;
    }
#endif
    // quarters of bytes are placed so that interleaving within 16-byte lanes gives natural order
    __m512i code = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), _mm512_loadu_si512(p));
    __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(TABLE.low), code, _mm512_load_si512(TABLE.low + 64));
    __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(TABLE.high), code, _mm512_load_si512(TABLE.high + 64));
    high = _mm512_ternarylogic_epi64(high, code, _mm512_set1_epi8((char)0x80), 0xF8);  // high | (code & sign)
    const __m512i words[2] = {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)}, nan = _mm512_set1_epi16(0x7fc0);
    out[0] = Pairs::shift(words[0], scale[0]), out[1] = Pairs::shift(words[1], scale[1]);
    // the exponent of NaN must not move
    if (__builtin_expect(_mm512_cmpeq_epi8_mask(_mm512_or_si512(code, _mm512_set1_epi8((char)0x80)), _mm512_set1_epi8(-1)) != 0, 0))
      for (int v = 0; v < 2; v++)
        out[v] = (V)_mm512_mask_mov_epi16((__m512i)out[v], _mm512_cmpeq_epi16_mask(_mm512_and_si512(words[v], _mm512_set1_epi16(0x7fff)), nan), nan);
  }
};
template <> struct Chunk<Pairs, FP4> {
  static constexpr int COLS = 128, BYTES = 64, VECS = 4;
  // Unscaled bf16 values of 64 bytes, per 16-byte lane: first and second half of the even inputs, then of the odd ones.
  static INLINE void values(__m512i code, __m512i* out) {
    const __m512i LOW = _mm512_broadcast_i32x4(
        _mm_setr_epi8(0, 0, -128, -64, 0, 64, -128, -64, 0, 0, -128, -64, 0, 64, -128, -64));
    const __m512i HIGH = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40, -128, -65,
                                                              -65, -65, -64, -64, -64, -64));
    const __m512i NIBBLE = _mm512_set1_epi8(15);
    __m512i even = _mm512_and_si512(code, NIBBLE), odd = _mm512_and_si512(_mm512_srli_epi16(code, 4), NIBBLE);
    __m512i even_low = _mm512_shuffle_epi8(LOW, even), even_high = _mm512_shuffle_epi8(HIGH, even);
    __m512i odd_low = _mm512_shuffle_epi8(LOW, odd), odd_high = _mm512_shuffle_epi8(HIGH, odd);
    out[0] = _mm512_unpacklo_epi8(even_low, even_high), out[1] = _mm512_unpackhi_epi8(even_low, even_high);
    out[2] = _mm512_unpacklo_epi8(odd_low, odd_high), out[3] = _mm512_unpackhi_epi8(odd_low, odd_high);
  }
  static INLINE void values(const u8* p, V* out) { values(_mm512_loadu_si512(p), (__m512i*)out); }
#if SG_TILES
  // Of every 64 inputs first the even, then the odd ones (see `spread`). Each pair of groups looks up its values in a table of its own.
  static INLINE void decode(const u8* p, const Pairs::Factor* scale, V* out) {
    const __m512i VALUES = _mm512_broadcast_i64x4(_mm256_setr_epi16(0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, (short)0x8000, (short)0xbf00,
                                                                    (short)0xbf80, (short)0xbfc0, (short)0xc000, (short)0xc040, (short)0xc080, (short)0xc0c0));
    const __m512i SECOND = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
    const __m512i scales = _mm512_castsi128_si512(_mm_loadl_epi64((const __m128i*)scale)), NEXT = _mm512_srli_epi16(SECOND, 4);
    for (int v = 0; v < 2; v++) {
      __m512i exponent = _mm512_permutexvar_epi16(_mm512_or_si512(NEXT, _mm512_set1_epi16(2 * v)), scales);
      __m512i table = _mm512_mask_add_epi16(VALUES, 0xfefefefe, VALUES, exponent);
      __m512i bytes = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)p + v));
      out[2 * v] = (V)_mm512_permutexvar_epi16(_mm512_ternarylogic_epi64(bytes, _mm512_set1_epi16(15), SECOND, 0xEA), table);  // (bytes & 15) | SECOND
      out[2 * v + 1] = (V)_mm512_permutexvar_epi16(_mm512_or_si512(_mm512_srli_epi16(bytes, 4), SECOND), table);
    }
  }
#else
  static INLINE void decode(const u8* p, const Pairs::Factor* scale, V* out) {
    __m512i v[4];  // quarters of lanes are placed so that the two interleavings give natural order
    values(_mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15),
                                    _mm512_loadu_si512(p)), v);
    out[0] = Pairs::shift(_mm512_unpacklo_epi16(v[0], v[2]), scale[0]);
    out[1] = Pairs::shift(_mm512_unpackhi_epi16(v[0], v[2]), scale[1]);
    out[2] = Pairs::shift(_mm512_unpacklo_epi16(v[1], v[3]), scale[2]);
    out[3] = Pairs::shift(_mm512_unpackhi_epi16(v[1], v[3]), scale[3]);
  }
#endif
  // For `dot`, x takes the order of `values` instead, so that a lane holds one group of 32 and one scale.
  static INLINE void arrange(V* x) {
    const __m512i APART = _mm512_set_epi16(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1, 30, 28, 26, 24, 22,
                                           20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    __m512i a[4];
    for (int i = 0; i < 4; i++) a[i] = _mm512_permutexvar_epi16(APART, (__m512i)x[i]);
    __m512i p = _mm512_shuffle_i32x4(a[0], a[1], 0x44), q = _mm512_shuffle_i32x4(a[2], a[3], 0x44);
    __m512i r = _mm512_shuffle_i32x4(a[0], a[1], 0xee), s = _mm512_shuffle_i32x4(a[2], a[3], 0xee);
    x[0] = (V)_mm512_shuffle_i32x4(p, q, 0x88), x[1] = (V)_mm512_shuffle_i32x4(p, q, 0xdd);
    x[2] = (V)_mm512_shuffle_i32x4(r, s, 0x88), x[3] = (V)_mm512_shuffle_i32x4(r, s, 0xdd);
  }
  static INLINE V scales(const u8* p) {  // four bytes, each the exponent of four floats
    u32 bytes = load<u32>(p);
    __m512i wide = _mm512_cvtepu8_epi32(_mm_shuffle_epi8(_mm_cvtsi32_si128(bytes),
                                                         _mm_setr_epi8(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3)));
    return (V)_mm512_slli_epi32(wide, 23);
  }
};
#endif

// Inputs of a product rounded up to whole chunks, in words; the words behind the last input are zero.
template <class M, int F> INLINE i64 words_of(i64 cols) {
  return (cols + Chunk<M, F>::COLS - 1) / Chunk<M, F>::COLS * Chunk<M, F>::VECS * VL;
}

// Scale rows of a weight, expanded to one factor per 32 inputs; the last few are remembered.
template <class M> struct Factors {
  static constexpr int KEPT = 8;
  const Weight* w;
  i64 width, held[KEPT];
  typename M::Factor* rows;
  static size_t need(i64 cols) { return KEPT * ((cols + 127) / 128 * 4); }
  Factors(const Weight& weight, typename M::Factor* memory) : w(&weight), width((weight.cols + 127) / 128 * 4), rows(memory) {
    for (auto& block : held) block = -1;
  }
  const typename M::Factor* of(i64 row) {
    if (!w->scale_kind) return rows;
    i64 block = row / w->block_rows, slot = block % KEPT, first = block * w->scale_cols();
    typename M::Factor* out = rows + slot * width;
    if (held[slot] == block) return out;
    held[slot] = block;
    i64 groups = (w->cols + GROUP - 1) / GROUP;
    if (w->block_cols == GROUP) {
      for (i64 g = 0; g < groups; g++) out[g] = M::factor(*w, first + g);
    } else {
      for (i64 g = 0; g < groups; g++) out[g] = M::factor(*w, first + g * GROUP / w->block_cols);
    }
    for (i64 g = groups; g < width; g++) out[g] = 0;
    return out;
  }
};

// A row of x as `dot` wants it.
template <class M, int F> INLINE void arrange(u32* row, i64 words) {
  if constexpr (F == FP4 && GROUPED<M, F>)
    for (i64 word = 0; word < words; word += Chunk<M, F>::VECS * VL) Chunk<M, F>::arrange((V*)(row + word));
}

// Rows lie one behind the other, but walked four at a time they are no pattern that the hardware recognises: asking for
// what comes 4 KB later makes a thread up to twice as fast. Addresses behind the end are harmless.
constexpr i64 AHEAD = 4096;
INLINE void fetch_ahead(const u8* p) { __builtin_prefetch((const void*)((uintptr_t)p + AHEAD)); }

// R rows of the weight times T arranged rows of x ([T][words / VL] vectors): out[r][t].
template <class M, int F, int R, int T>
static inline void dot(const Weight& w, i64 row, Factors<M>& factors, const V* x, i64 ldx, float (*out)[T]) {
  typedef Chunk<M, F> C;
  constexpr bool grouped = GROUPED<M, F>, bytes = grouped && F == FP4;  // scales as they are stored
  constexpr i64 GROUPS = C::COLS / GROUP;
  const u8* data[R];
  const typename M::Factor* scale[R];
  for (int r = 0; r < R; r++) data[r] = w.data + (row + r) * w.row_bytes(), scale[r] = bytes ? nullptr : factors.of(row + r);
  V acc[R][T] = {};
  auto step = [&](i64 c, int r, const u8* p, const u8* group_scales) __attribute__((always_inline)) {
    V value[C::VECS];
    fetch_ahead(p);
    if constexpr (grouped) {
      V factor;
      if constexpr (bytes) factor = C::scales(group_scales);
      else factor = C::scales(scale[r] + c * GROUPS);
      C::values(p, value);
      // sums of at most four vectors: longer chains wait for their own additions
#pragma GCC unroll 2
      for (int first = 0; first < C::VECS; first += 4)
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) {
          V part = {};
#pragma GCC unroll 4
          for (int v = first; v < first + 4 && v < C::VECS; v++) part = M::madd(part, value[v], x[t * ldx + c * C::VECS + v]);
          acc[r][t] = part * factor + acc[r][t];
        }
      return;
    }
    C::decode(p, scale[r] + c * C::COLS / GROUP, value);
#pragma GCC unroll 8
    for (int t = 0; t < T; t++)
#pragma GCC unroll 4
      for (int v = 0; v < C::VECS; v++) acc[r][t] = M::madd(acc[r][t], value[v], x[t * ldx + c * C::VECS + v]);
  };
  i64 whole = w.cols / C::COLS, rest = w.cols % C::COLS;
  for (i64 c = 0; c < whole; c++)
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) step(c, r, data[r] + c * C::BYTES, bytes ? w.scale + (row + r) * w.scale_cols() + c * GROUPS : nullptr);
  if (rest) {
    u8 last[R][C::BYTES] = {}, scales[R][4] = {};
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      memcpy(last[r], data[r] + whole * C::BYTES, w.row_bytes() - whole * C::BYTES);
      if (bytes) memcpy(scales[r], w.scale + (row + r) * w.scale_cols() + whole * GROUPS, w.scale_cols() - whole * GROUPS);
      step(whole, r, last[r], scales[r]);
    }
  }
  const V* flat = acc[0];
  float* to = out[0];
#pragma GCC unroll 8
  for (int i = 0; i + 4 <= R * T; i += 4) {
    float four[VL];
    store(four, sum_four(flat[i], flat[i + 1], flat[i + 2], flat[i + 3]) * UNIT<M, F>);
    memcpy(to + i, four, 16);
  }
  for (int i = R * T / 4 * 4; i < R * T; i++) to[i] = sum(flat[i]) * UNIT<M, F>;
}

// `emit(row, t, value)` for the rows first .. stop of the weight and the T rows of x.
template <class M, int F, int T, class Emit>
static void dot_rows(const Weight& w, i64 first, i64 stop, Factors<M>& factors, const V* x, i64 ldx, Emit emit) {
  constexpr int R = T <= (VL == 16 ? 4 : 2) ? 4 : 2;  // most sums stay in registers
  i64 row = first;
  for (; row + R <= stop; row += R) {
    float out[R][T];
    dot<M, F, R, T>(w, row, factors, x, ldx, out);
    for (int r = 0; r < R; r++)
      for (int t = 0; t < T; t++) emit(row + r, t, out[r][t]);
  }
  for (; row < stop; row++) {
    float out[1][T];
    dot<M, F, 1, T>(w, row, factors, x, ldx, out);
    for (int t = 0; t < T; t++) emit(row, t, out[0][t]);
  }
}

#define SIZE(n) std::integral_constant<int, n>()

INLINE u32* word_of_row(u32* rows, i64 cap, i64 row, i64 word) { return rows + (word / KB * cap + row) * LDW + word % KB; }

// Rows first .. first + n of the weight into `rows`.
template <class M, int F>
static void decode_rows(const Weight& w, i64 first, i64 n, Factors<M>& factors, u32* rows, i64 cap) {
  typedef Chunk<M, F> C;
  constexpr i64 WORDS = C::VECS * VL;
  i64 whole = w.cols / C::COLS, rest = w.cols % C::COLS;
  for (i64 row = 0; row < n; row++) {
    const u8* data = w.data + (first + row) * w.row_bytes();
    const typename M::Factor* scale = factors.of(first + row);
    auto step = [&](i64 c, const u8* p, u32* out) __attribute__((always_inline)) {
      V value[C::VECS];
      C::decode(p, scale + c * C::COLS / GROUP, value);
#pragma GCC unroll 4
      for (int v = 0; v < C::VECS; v++) store(out + v * VL, value[v]);
    };
    for (i64 c = 0; c < whole; c += KB / WORDS) {
      u32* out = word_of_row(rows, cap, row, c * WORDS);
      i64 stop = c + KB / WORDS < whole ? c + KB / WORDS : whole;
      for (i64 i = c; i < stop; i++, out += WORDS) step(i, data + i * C::BYTES, out);
    }
    if (rest) {
      u8 last[C::BYTES] = {};
      memcpy(last, data + whole * C::BYTES, w.row_bytes() - whole * C::BYTES);
      step(whole, last, word_of_row(rows, cap, row, whole * WORDS));
    }
  }
}

// What is fetched while something else is multiplied: `bytes` of it in every step, so that no step waits for all.
struct Ahead {
  const u8* at = nullptr;
  i64 bytes = 0;
};

// c[R][N] (+)= rows [R][steps] · lanes [steps][N vectors]; rows lie `LD` words apart, or `apart` where LD is 0
template <class M, int R, int N, i64 LD>
static __attribute__((noinline)) void tile(const u32* rows, i64 apart, const V* lanes, i64 steps, V* c, bool first, Ahead& ahead) {
  if (LD) apart = LD;
  V acc[R][N];
#pragma GCC unroll 32
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) acc[r][j] = first ? V{} : c[r * N + j];
  const u8* next = ahead.at;
  const i64 bytes = ahead.bytes;
  ahead.at += bytes * steps;
  for (i64 s = 0; s < steps; s++) {
    __builtin_prefetch(next + bytes * s);
    V x[N];
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) x[j] = lanes[s * N + j];
#pragma GCC unroll 32
    for (int r = 0; r < R; r++) {
      V w = (V)splat_bits(rows[r * apart + s]);
#pragma GCC unroll 4
      for (int j = 0; j < N; j++) acc[r][j] = M::madd(acc[r][j], w, x[j]);
    }
  }
#pragma GCC unroll 32
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) c[r * N + j] = acc[r][j];
}

// c [n][count vectors] (+)= rows [n][words] · lanes [words][count vectors]; up to 15 rows behind the last are read and written
// too. Without LD the rows are those of a matrix, `cap` words apart.
constexpr i64 OVERSHOOT = 15;
#if SG_TILES
#include "tiles.h"
#endif
template <class M, i64 LD = LDW>
static void product(const u32* rows, i64 cap, i64 n, const u32* lanes, int count, i64 words, V* c, bool first = true,
                    Ahead ahead = Ahead()) {
  i64 begin = 0;
#if SG_TILES
  if constexpr (ON_TILES<M>) {
    begin = words / VL * VL;
    if (begin) tiled_product<LD>(rows, cap, n, lanes, count, begin, c, first, ahead), first = false;
  }
#endif
  for (i64 word = begin; word < words; word += KB - word % KB) {
    i64 steps = words - word < KB - word % KB ? words - word : KB - word % KB, apart = LD ? LD : cap;
    const u32* block = rows + (LD ? word / KB * cap * LD + word % KB : word);
    const V* x = (const V*)lanes + word * count;
    auto walk = [&](auto height, auto vectors) {
      constexpr int R = height.value, N = vectors.value;
      i64 r = 0;
      if constexpr (R == 6)  // 16 heads are 6 + 6 + 4
        for (; n - r > 4 || n - r < 1; r += R) {
          if (n - r < 1) return;
          tile<M, R, N, LD>(block + r * apart, apart, x, steps, c + r * N, first && word == begin, ahead);
        }
      for (; r < n; r += R == 6 ? 4 : R) tile<M, R == 6 ? 4 : R, N, LD>(block + r * apart, apart, x, steps, c + r * N, first && word == begin, ahead);
    };
    if constexpr (VL == 16) {
      if (count == 4) walk(SIZE(6), SIZE(4));
      if (count == 3) walk(SIZE(8), SIZE(3));
      if (count == 2) walk(SIZE(8), SIZE(2));
      if (count == 1) walk(SIZE(16), SIZE(1));
    } else {
      if (count == 2) walk(SIZE(6), SIZE(2));
      if (count == 1) walk(SIZE(8), SIZE(1));
    }
  }
}

// Tiles that `product` cuts n rows into.
INLINE i64 tiles_of(i64 n, int count) { return VL == 16 ? (count == 4 ? (n + 5) / 6 : count == 1 ? (n + 15) / 16 : (n + 7) / 8) : count == 2 ? (n + 5) / 6 : (n + 7) / 8; }

// Turns n <= count * VL rows of `words` words (absent ones, null too, are zero) into lanes.
static inline void pack_lanes(const u32* const* rows, i64 n, i64 words, u32* lanes, int count) {
  for (int j = 0; j < count; j++)
    for (i64 word = 0; word < words; word += VL) {
      VU v[VL];
      for (int i = 0; i < VL; i++) v[i] = j * VL + i < n && rows[j * VL + i] ? load<VU>(rows[j * VL + i] + word) : VU{};
      transpose(v);
      for (int i = 0; i < VL; i++) store(lanes + ((word + i) * count + j) * VL, v[i]);
    }
}

// Lanes in the order in which FP4 weights are decoded; for tiles: of every 64 inputs first the even, then the odd ones.
template <class M, int F> static inline void spread(u32* lanes, i64 words, int count) {
  if constexpr (M::per_word == 1 && F == FP4 && GROUPED<M, F>) {
    typedef Chunk<M, F> C;
    V natural[C::COLS * MAX_COUNT];
    for (i64 block = 0; block < words * count; block += C::COLS * count) {
      V* at = (V*)lanes + block;
      memcpy(natural, at, C::COLS * count * sizeof(V));
      for (int i = 0; i < C::COLS; i++)
        for (int j = 0; j < count; j++) at[i * count + j] = natural[C::place(i / VL, i % VL) * count + j];
    }
  }
  if constexpr (ON_TILES<M> && F == FP4)
    for (i64 block = 0; block < words * count; block += 32 * count) {
      VU *at = (VU*)lanes + block, even[16 * MAX_COUNT], odd[16 * MAX_COUNT];
      for (int i = 0; i < 16; i++)
        for (int j = 0; j < count; j++) {
          VU first = at[2 * i * count + j], second = at[(2 * i + 1) * count + j];
          even[i * count + j] = (first & 0xffff) | second << 16;
          odd[i * count + j] = first >> 16 | (second & 0xffff0000u);
        }
      memcpy(at, even, 16 * count * sizeof(VU)), memcpy(at + 16 * count, odd, 16 * count * sizeof(VU));
    }
}
