// Rows of the cache, in pages.
#pragma once
#include "rows.h"

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

inline bool in_pairs(int q_dtype, int row_dtype) { return SG_PAIRS && q_dtype == BFLOAT16 && row_dtype == BFLOAT16; }
