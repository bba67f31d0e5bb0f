// FP8 and FP4 weights as fp32 numbers, where the processor looks up or converts many of them at once. Included by product.h.
//
// `values` gives a chunk without its scales, in the order that `place` says: a permutation of its inputs, which x takes too
// (`arrange`, `spread`). Lanes of one group of 32 inputs share a scale, so that scales meet the sum of a group in `dot`.

// The values of e8m0 codes; 0 is 2^-127, which fp32 has among its subnormal numbers, and 255 is NaN.
struct E8m0Table {
  u32 bits[256];
  constexpr E8m0Table() : bits() {
    for (u32 code = 0; code < 256; code++) bits[code] = code == 0 ? 0x00400000 : code == 255 ? 0x7fc00000 : code << 23;
  }
};
static constexpr E8m0Table E8M0_VALUES;
INLINE float e8m0_value(u8 code) { return load<float>(E8M0_VALUES.bits + code); }

template <> struct Chunk<Floats, FP8> {
  static constexpr int COLS = GROUP, BYTES = GROUP, VECS = GROUP / VL;
  // Sign, exponent and fraction take their places in an fp16 number, whose conversion knows subnormal ones whatever is
  // switched off. Moving them to their places in fp32 is a fifth faster where all are normal, and half as fast elsewhere.
  static INLINE void values(const u8* p, V* out) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      __m256i code = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p + half));
      __m256i number = _mm256_and_si256(_mm256_slli_epi16(code, 7), _mm256_set1_epi16((short)0xbf80));
#if defined(__AVX512F__)
      out[half] = (V)_mm512_cvtph_ps(number);
#else
      out[2 * half] = (V)_mm256_cvtph_ps(_mm256_castsi256_si128(number));
      out[2 * half + 1] = (V)_mm256_cvtph_ps(_mm256_extracti128_si256(number, 1));
#endif
    }
    __m256i size = _mm256_or_si256(_mm256_loadu_si256((const __m256i*)p), _mm256_set1_epi8((char)0x80));
    if (__builtin_expect(_mm256_movemask_epi8(_mm256_cmpeq_epi8(size, _mm256_set1_epi8(-1))), 0))
#pragma GCC unroll 4
      for (int v = 0; v < VECS; v++) out[v] = vabs(out[v]) == 480 / UNIT<Floats, FP8> ? splat(__builtin_nanf("")) : out[v];
  }
  static INLINE V scales(const float* scale) { return splat(*scale); }
  static INLINE void decode(const u8* p, const float* scale, V* out) {
    values(p, out);
#pragma GCC unroll 4
    for (int v = 0; v < VECS; v++) out[v] = out[v] * UNIT<Floats, FP8> * *scale;
  }
};

template <> struct Chunk<Floats, FP4> {
  static constexpr int VECS = 8, COLS = VECS * VL, BYTES = COLS / 2, GROUPS = COLS / GROUP;
#if defined(__AVX512F__)
  // Eight inputs lie in four bytes: each vector takes one of every eight and looks it up among all sixteen values.
  static constexpr int place(int v, int lane) { return 8 * lane + v; }
  static INLINE void values(const u8* p, V* out) {
    const __m512 VALUES = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
    __m512i code = _mm512_loadu_si512(p);
#pragma GCC unroll 8
    for (int v = 0; v < VECS; v++) out[v] = (V)_mm512_permutexvar_ps(_mm512_srli_epi32(code, 4 * v), VALUES);
  }
#else
  // Bytes are looked up, a low and a high one for each value, which together are its upper half.
  static constexpr int place(int v, int lane) { return lane / 4 * GROUP + lane % 4 * 4 + (v & 1) * 2 + (v & 2) * 8 + (v >> 2); }
  static INLINE void values(const u8* p, V* out) {
    const __m256i LOW = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 0, -128, -64, 0, 64, -128, -64, 0, 0, -128, -64, 0, 64, -128, -64));
    const __m256i HIGH = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40, -128, -65, -65, -65, -64, -64, -64, -64));
    const __m256i NIBBLE = _mm256_set1_epi8(15), UPPER = _mm256_set1_epi32((int)0xffff0000u);
    __m256i code = _mm256_loadu_si256((const __m256i*)p);
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; odd++) {
      __m256i at = _mm256_and_si256(odd ? _mm256_srli_epi16(code, 4) : code, NIBBLE);
      __m256i low = _mm256_shuffle_epi8(LOW, at), high = _mm256_shuffle_epi8(HIGH, at);
      __m256i first = _mm256_unpacklo_epi8(low, high), second = _mm256_unpackhi_epi8(low, high);
      out[4 * odd] = (V)_mm256_slli_epi32(first, 16), out[4 * odd + 1] = (V)_mm256_and_si256(first, UPPER);
      out[4 * odd + 2] = (V)_mm256_slli_epi32(second, 16), out[4 * odd + 3] = (V)_mm256_and_si256(second, UPPER);
    }
  }
#endif
#if defined(__AVX512F__)
  static INLINE V in_lanes(float a, float b, float c, float d) {  // scales of groups
    return (V)_mm512_insertf32x8(_mm512_castps256_ps512(_mm256_set_m128(_mm_set1_ps(b), _mm_set1_ps(a))), _mm256_set_m128(_mm_set1_ps(d), _mm_set1_ps(c)), 1);
  }
#else
  static INLINE V in_lanes(float a, float b) { return (V)_mm256_blend_ps(_mm256_set1_ps(a), _mm256_set1_ps(b), 0xf0); }
#endif
  template <size_t... G> static INLINE V scales(const u8* code, std::index_sequence<G...>) { return in_lanes(e8m0_value(code[G])...); }
  template <size_t... G> static INLINE V scales(const float* scale, std::index_sequence<G...>) { return in_lanes(scale[G]...); }
  template <class S> static INLINE V scales(const S* scale) { return scales(scale, std::make_index_sequence<GROUPS>()); }
  static INLINE void decode(const u8* p, const float* scale, V* out) {
    V factor = scales(scale);
    values(p, out);
#pragma GCC unroll 8
    for (int v = 0; v < VECS; v++) out[v] *= factor;
  }
  static INLINE void arrange(V* x) {
    float natural[COLS];
    memcpy(natural, x, sizeof(natural));
    for (int v = 0; v < VECS; v++)
      for (int lane = 0; lane < VL; lane++) ((float*)x)[v * VL + lane] = natural[place(v, lane)];
  }
};
