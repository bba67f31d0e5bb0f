// Rows of the cache, in pages.
#pragma once
#include "rows.h"
#include "stored.h"

// Paged rows: row n of sequence s lies in page table[s][(n / page_rows) % table_cols].
struct Pages {
  const char* data;
  const i32* table;
  i64 page_rows, table_cols;
  RowForm form;
  const char* row(i64 seq, i64 n) const {
    i64 page = table[seq * table_cols + n / page_rows % table_cols];
    return data + (page * page_rows + n % page_rows) * form.bytes;
  }
};

// VL words of a plain row (null: zeros), from channel word * per_word on.
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

// A row as `words` words, zero behind its last channel.
template <class M> inline void read_row(const char* row, const RowForm& form, i64 words, u32* out) {
  typedef typename M::Element E;
  if (!form.stored()) {
    for (i64 word = 0; word < words; word += VL) store(out + word, row_words<M>(row, form.dtype, word, form.D));
    return;
  }
  decode_row((const u8*)row, form, (E*)out);
  memset((E*)out + form.D, 0, words * 4 - form.D * sizeof(E));
}

inline bool in_pairs(int q_dtype, const RowForm& form) { return SG_PAIRS && q_dtype == BFLOAT16 && (form.stored() || form.dtype == BFLOAT16); }
