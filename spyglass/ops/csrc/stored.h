// Rows of the cache as codes (`quant/formats.py`, StoredRow): codes of the first channels, the others as bf16, a scale byte
// per block. Decoding is exact; a scale that is no number makes its block no numbers.
#pragma once
#include "product.h"
#include "quantise.h"

// How rows of D channels lie in memory. `code`: 0 fp32, 1 bf16; of stored rows `native.row_code` says what it holds.
struct RowForm {
  i64 D, bytes, dims = 0, block = 1, tail_at = 0, scales_at = 0;
  int dtype, element, e4m3_scale;
  RowForm(i64 code, i64 channels)
      : D(channels), bytes(channels * (code == 1 ? 2 : 4)), dtype(code & 1), element(code >> 1 & 3), e4m3_scale(code >> 3 & 1) {
    if (!element) return;
    block = code >> 4 & 0xffff, dims = code >> 20;
    tail_at = ((element == E4M3 ? dims : (dims + 1) / 2) + 1) / 2 * 2;
    scales_at = tail_at + 2 * (D - dims);
    bytes = (scales_at + (dims + block - 1) / block + 3) / 4 * 4;
  }
  bool stored() const { return element != NONE; }
};

// A scale byte as a number.
INLINE float stored_scale(const RowForm& f, u8 byte) {
  u32 bits = (u32)byte << 23;  // e8m0; what 0 stands for is never stored
  if (f.e4m3_scale) {
    if (byte < 8) return byte * 0x1p-9f;
    bits = ((u32)byte << 20) + (120u << 23);
  }
  bool no_number = f.e4m3_scale ? (byte & 127) == 127 : byte == 255;
  return no_number ? __builtin_nanf("") : load<float>(&bits);
}

INLINE V numbers_of_e4m3(VU code) {
  VU size = code & 0x7f;
  V small = __builtin_convertvector((VI)size, V) * 0x1p-9f, normal = (V)((size << 20) + (120u << 23));
  V value = (VI)size < 8 ? small : normal;
  return (V)((VU)((VI)size == 127 ? splat(__builtin_nanf("")) : value) | (code & 0x80) << 24);
}
INLINE V numbers_of_e2m1(VU code) {  // doubled magnitudes 0 1 2 3 4 6 8 12 as nibbles of a constant
  VU twice = (splat_bits(0xC8643210u) >> ((code & 7) << 2)) & 15;
  return (V)((VU)(__builtin_convertvector((VI)twice, V) * 0.5f) | (code & 8) << 28);
}
// And back, of numbers that have a code.
INLINE VU codes_of(V x, int element) {
  VU bits = (VU)x, size = bits & 0x7fffffff;
  if (element == E4M3) {
    VU small = (VU)__builtin_convertvector((V)size * 0x1p9f, VI);
    return ((VI)size < (121 << 23) ? small : (size >> 20) - 960) | (bits >> 24 & 0x80);
  }
  VU small = (VU)__builtin_convertvector((V)size * 2.0f, VI);
  return ((VI)size < (127 << 23) ? small : (size >> 22) - 252) | (bits >> 28 & 8);
}

// VL codes from channel `channel` on, of which `left` are there, as numbers of their element.
template <class N> INLINE V stored_codes(const u8* row, const RowForm& f, i64 channel, N left) {
  if (f.element == E4M3) {
    VB part = {};
    if (left >= VL) part = load<VB>(row + channel);
    else memcpy(&part, row + channel, left);
    return numbers_of_e4m3(extend(part));
  }
  u64 nibbles = 0;
  memcpy(&nibbles, row + channel / 2, left >= VL ? VL / 2 : (left + 1) / 2);
  LANES(shift, lane % 8 * 4);
  VU code = splat_bits((u32)nibbles);
  if constexpr (VL == 16) {
    LANES(upper, lane / 8 * -1);
    code = upper ? splat_bits(nibbles >> 32) : code;
  }
  return numbers_of_e2m1(code >> (VU)shift & 15);
}
// The same back, where the row was zero.
template <class N> INLINE void store_codes(u8* row, const RowForm& f, i64 channel, VU codes, N left) {
  const VB bytes = __builtin_convertvector(codes, VB);
  const i64 n = left >= VL ? VL : left;
  if (f.element == E4M3) memcpy(row + channel, &bytes, n);
  else
    for (i64 i = 0; i < n; i += 2) row[(channel + i) / 2] = bytes[i] | bytes[i + 1] << 4;
}

#if SG_PAIRS
// 32 e2m1 codes with the scales of their first and second 16.
INLINE V stored_pairs(const u8* p, const RowForm& f, const u8* scales) {
  const __m256i VALUES = _mm256_setr_epi16(0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, (short)0x8000, (short)0xbf00,
                                           (short)0xbf80, (short)0xbfc0, (short)0xc000, (short)0xc040, (short)0xc080, (short)0xc0c0);
  const __m512i SECOND = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
  __m512i table = _mm512_broadcast_i64x4(VALUES);
  if (f.e4m3_scale) {
    V numbers = widen((VH)VALUES);
    __m256i first = (__m256i)narrow(numbers * stored_scale(f, scales[0]));
    table = _mm512_inserti64x4(_mm512_castsi256_si512(first), f.block > 16 ? first : (__m256i)narrow(numbers * stored_scale(f, scales[1])), 1);
  } else {
    table = _mm512_mask_add_epi16(table, 0xfefefefe, table, _mm512_set1_epi16((short)(((int)scales[0] - 127) * 128)));
  }
  __m128i bytes = _mm_loadu_si128((const __m128i*)p), low = _mm_and_si128(bytes, _mm_set1_epi8(15));
  __m128i high = _mm_and_si128(_mm_srli_epi16(bytes, 4), _mm_set1_epi8(15));
  __m256i codes = _mm256_set_m128i(_mm_unpackhi_epi8(low, high), _mm_unpacklo_epi8(low, high));
  return (V)_mm512_permutexvar_epi16(_mm512_or_si512(_mm512_cvtepu8_epi16(codes), SECOND), table);
}
#endif

// A stored row to its D numbers.
template <class E> inline void decode_row(const u8* row, const RowForm& f, E* y) {
  const u8* scales = row + f.scales_at;
  i64 done = 0;
#if SG_PAIRS
  if constexpr (sizeof(E) == 2) {  // whole stretches in vectors of pairs; a power of two of 255 is no number
    if (f.element == E4M3 && !f.e4m3_scale && f.block % 32 == 0)
      for (; done + 64 <= f.dims; done += 64) {
        const u8 first = scales[done / f.block], second = scales[(done + 32) / f.block];
        if (first == 255 || second == 255) break;
        const Pairs::Factor factors[2] = {(Pairs::Factor)((first - 127) * 128), (Pairs::Factor)((second - 127) * 128)};
        V out[2];
        Chunk<Pairs, FP8>::decode(row + done, factors, out);
        store(y + done, out[0]), store(y + done + 32, out[1]);
      }
    if (f.element == E2M1 && f.block % (f.e4m3_scale ? 16 : 32) == 0)
      for (; done + 32 <= f.dims; done += 32) {
        const u8* scale = scales + done / f.block;
        if (!f.e4m3_scale && *scale == 255) break;
        store(y + done, stored_pairs(row + done / 2, f, scale));
      }
  }
#endif
  for (i64 start = done; start < f.dims; start += f.block) {
    const float scale = stored_scale(f, scales[start / f.block]);
    vectors(f.dims - start < f.block ? f.dims - start : f.block, [&](i64 i, auto left) {
      store_n(y + start + i, stored_codes(row, f, start + i, left) * scale, left);
    });
  }
  const bf16* tail = (const bf16*)(row + f.tail_at);
  if (sizeof(E) == 2) memcpy((void*)(y + f.dims), tail, 2 * (f.D - f.dims));
  else vectors(f.D - f.dims, [&](i64 i, auto left) { store_n(y + f.dims + i, load_n(tail + i, left), left); });
}

// A row before rounding to codes.
template <class T> inline void encode_row(const T* x, const RowForm& f, u8* row) {
  memset(row, 0, f.bytes);
  with_rounding(Quant{f.element, (int)f.block, f.e4m3_scale}, [&](auto rounding) {
    typedef decltype(rounding) R;
    for (i64 start = 0; start < f.dims; start += f.block) {
      const i64 n = f.dims - start < f.block ? f.dims - start : f.block;
      const float limit = f.e4m3_scale ? __builtin_inff() : 0x1.fffffep127f;
      V amax = {};
      VI numbers = (VI)(VU{} - 1);
      vectors(n, [&](i64 i, auto left) {
        V v = vabs(load_n(x + start + i, left));
        amax = vmax(v, amax), numbers &= v <= limit;
      });
      const V scale = R::scale(top(amax)), inverse = 1.0f / scale;
      u8 byte = f.e4m3_scale ? codes_of(scale, E4M3)[0] : ((VU)scale)[0] >> 23;
      if (some(~numbers)) byte = f.e4m3_scale ? 127 : 255;
      row[f.scales_at + start / f.block] = byte;
      vectors(n, [&](i64 i, auto left) {
        V x_i = load_n(x + start + i, left), scaled = f.e4m3_scale ? x_i / scale : x_i * inverse;
        V number = to_grid<R::FRACTION>(vmin(splat(R::TOP), vmax(splat(-R::TOP), scaled)), splat(R::LOW));
        store_codes(row, f, start + i, codes_of(number, f.element), left);
      });
    }
  });
  bf16* tail = (bf16*)(row + f.tail_at);
  vectors(f.D - f.dims, [&](i64 i, auto left) { store_n(tail + i, load_n(x + f.dims + i, left), left); });
}
