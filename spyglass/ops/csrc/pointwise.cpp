// What happens between the products: norms, rotations, roundings, residual streams, pooling, routing. Each is one pass over
// its rows, shared out among the threads when there is enough of it.
#include <cmath>

#include "adapters.h"
#include "rows.h"

namespace {

constexpr i64 ALONE = 16384;  // elements that one thread does faster than two can meet
constexpr i64 MEDIUM = 64;    // tokens up to which turning the matrix of a hyper-connection costs more than it gains

// run(first, stop) over `rows` rows of `width` elements.
template <class Run> void over_rows(i64 rows, i64 width, int threads, Run run) {
  if (rows * width <= ALONE) return run((i64)0, rows);
  i64 step = ALONE / 2 / (width < 1 ? 1 : width);
  step = step < 1 ? 1 : step;
  parallel(threads, (rows + step - 1) / step, [&](i64 task) { run(task * step, (task + 1) * step < rows ? (task + 1) * step : rows); });
}

// run(typed pointer) for a buffer of float (dtype 0) or bf16 (dtype 1).
template <class Run> void typed(int dtype, Run run) { dtype == FLOAT32 ? run((float*)nullptr) : run((bf16*)nullptr); }

INLINE float to(float x, float*) { return x; }
INLINE float to(float x, bf16*) { return round_bf16(x); }
INLINE V to(V x, float*) { return x; }
INLINE V to(V x, bf16*) { return round_bf16(x); }

float square_sum(const float* x, i64 n) {
  V total[4] = {};
  i64 i = 0;
  for (; i + 4 * VL <= n; i += 4 * VL)
    for (int j = 0; j < 4; j++) {
      V v = load_v(x + i + j * VL);
      total[j] += v * v;
    }
  for (; i < n; i += VL) {
    V v = load_n(x + i, n - i);
    total[0] += v * v;
  }
  return sum((total[0] + total[1]) + (total[2] + total[3]));
}

}  // namespace

// out [N, D] = w * (x * rsqrt(mean x^2 + eps)); `stepwise`: every intermediate is a number of x's dtype.
extern "C" void sg_rms_norm(const void* x_, int dtype, i64 N, i64 D, const float* w, float eps, int stepwise, void* out_, int threads) {
  typed(dtype, [&](auto type) {
    typedef std::remove_pointer_t<decltype(type)> T;
    over_rows(N, D, threads, [&](i64 first, i64 stop) {
      for (i64 n = first; n < stop; n++) {
        const T* x = (const T*)x_ + n * D;
        T* out = (T*)out_ + n * D;
        V total = {};
        vectors(D, [&](i64 i, auto left) {
          V v = load_n(x + i, left);
          total += stepwise ? to(v * v, type) : v * v;
        });
        float mean = sum(total) / D;
        float factor = stepwise ? to(1.0f / sqrtf(to(to(mean, type) + eps, type)), type) : 1.0f / sqrtf(mean + eps);
        vectors(D, [&](i64 i, auto left) {
          V v = load_n(x + i, left) * factor;
          store_n(out + i, w ? load_n(w + i, left) * v : v, left);
        });
      }
    });
  });
}

// x [T, H, D] -> out; pairs of the last 2 R channels turn by the angle of row t; cos, sin [T, R].
extern "C" void sg_rope(const void* x_, int dtype, i64 T_, i64 H, i64 D, const float* cos, const float* sin, i64 R, int inverse,
                        void* out_, int threads) {
  typed(dtype, [&](auto type) {
    typedef std::remove_pointer_t<decltype(type)> T;
    over_rows(T_, H * D, threads, [&](i64 first, i64 stop) {
      SCRATCH(memory);
      float *c = memory.get<float>(4 * R + 2 * VL), *s = c + 2 * R + VL;
      for (i64 t = first; t < stop; t++) {
        for (i64 i = 0; i < R; i++) {
          c[2 * i] = c[2 * i + 1] = cos[t * R + i];
          s[2 * i + 1] = inverse ? -sin[t * R + i] : sin[t * R + i];
          s[2 * i] = -s[2 * i + 1];
        }
        for (i64 h = 0; h < H; h++) {
          const T* x = (const T*)x_ + (t * H + h) * D;
          T* out = (T*)out_ + (t * H + h) * D;
          i64 plain = D - 2 * R;
          memcpy(out, x, plain * sizeof(T));
          vectors(2 * R, [&](i64 i, auto left) {
            V v = load_n(x + plain + i, left);
            store_n(out + plain + i, v * load_n(c + i, left) + partner<1>(v) * load_n(s + i, left), left);
          });
        }
      }
    });
  });
}

// out [N, D]: the first `dims` channels rounded in blocks, the others as they are or rounded to bf16.
extern "C" void sg_fake_quant(const void* x_, int dtype, i64 N, i64 D, i64 dims, int element, int block, int e4m3_scale, int tail_bf16,
                              void* out_, int threads) {
  Quant q{element, block, e4m3_scale};
  typed(dtype, [&](auto type) {
    typedef std::remove_pointer_t<decltype(type)> T;
    over_rows(N, D, threads, [&](i64 first, i64 stop) {
      for (i64 n = first; n < stop; n++) {
        const T* x = (const T*)x_ + n * D;
        T* out = (T*)out_ + n * D;
        quantise_row(x, out, dims, q);
        vectors(D - dims, [&](i64 i, auto left) {
          V v = load_n(x + dims + i, left);
          store_n(out + dims + i, tail_bf16 ? round_bf16(v) : v, left);
        });
      }
    });
  });
}

// Sum and difference of lanes `half` apart.
template <int half> INLINE V butterfly(V v) {
  LANES(upper, lane & half ? -1 : 0);
  return partner<half>(v) + (upper ? -v : v);
}

// out [N, D] = D^-1/2 * Sylvester Hadamard * x, by butterflies; D a power of two.
extern "C" void sg_hadamard(const void* x_, int dtype, i64 N, i64 D, void* out_, int threads) {
  typed(dtype, [&](auto type) {
    typedef std::remove_pointer_t<decltype(type)> T;
    float scale = (float)(1.0 / sqrt((double)D));
    over_rows(N, D, threads, [&](i64 first, i64 stop) {
      SCRATCH(memory);
      float* y = memory.get<float>(D + VL);
      for (i64 n = first; n < stop; n++) {
        const T* x = (const T*)x_ + n * D;
        T* out = (T*)out_ + n * D;
        vectors(D, [&](i64 i, auto left) {
          V v = load_n(x + i, left);
          if (D > 1) v = butterfly<1>(v);
          if (D > 2) v = butterfly<2>(v);
          if constexpr (VL > 4)
            if (D > 4) v = butterfly<4>(v);
          if constexpr (VL > 8)
            if (D > 8) v = butterfly<8>(v);
          store_v(y + i, v);
        });
        for (i64 half = VL; half < D; half *= 2)
          for (i64 block = 0; block < D; block += 2 * half)
            for (i64 i = block; i < block + half; i += VL) {
              V a = load_v(y + i), b = load_v(y + i + half);
              store_v(y + i, a + b);
              store_v(y + i + half, a - b);
            }
        vectors(D, [&](i64 i, auto left) { store_n(out + i, load_v(y + i) * scale, left); });
      }
    });
  });
}

namespace {

// pre, post, comb of VL tokens at once, one per lane, from m [M (2 + M)] (spec v4 3.2). S is M itself, or a bound for it.
template <int S>
void mix_lanes(int streams, V* m, const float* scale, const float* base, float hc_eps, i64 rounds, V* pre, V* post, V (*comb)[S]) {
  const int M = S == 4 ? 4 : streams;
  for (int j = 0; j < M; j++) pre[j] = vsigmoid(m[j] * scale[0] + base[j]) + hc_eps;
  for (int j = 0; j < M; j++) post[j] = 2.0f * vsigmoid(m[M + j] * scale[1] + base[M + j]);
  for (int j = 0; j < M; j++) {
    V most = splat(-__builtin_inff()), total = {};
    for (int l = 0; l < M; l++) {
      comb[j][l] = m[2 * M + j * M + l] * scale[2] + base[2 * M + j * M + l];
      most = vmax(most, comb[j][l]);
    }
    for (int l = 0; l < M; l++) total += comb[j][l] = vexp(comb[j][l] - most);
    for (int l = 0; l < M; l++) comb[j][l] = comb[j][l] / total + hc_eps;
  }
  for (i64 round = 0; round < rounds; round++) {
    for (int j = 0; round && j < M; j++) {
      V total = splat(hc_eps);
      for (int l = 0; l < M; l++) total += comb[j][l];
      for (int l = 0; l < M; l++) comb[j][l] /= total;
    }
    for (int l = 0; l < M; l++) {
      V total = splat(hc_eps);
      for (int j = 0; j < M; j++) total += comb[j][l];
      for (int j = 0; j < M; j++) comb[j][l] /= total;
    }
  }
}

}  // namespace

// streams [T, M, C] -> pre [T, M], post [T, M], comb [T, M, M]; fn [J, M C], J = M (2 + M), M <= 8.
extern "C" void sg_hyper_mix(const void* streams, int dtype, i64 T, i64 M, i64 C, const float* fn, const float* scale,
                            const float* base, float norm_eps, float hc_eps, i64 rounds, float* pre, float* post, float* comb,
                            int threads) {
  SCRATCH(rows_memory);
  SCRATCH(m_memory);
  i64 J = M * (2 + M), E = M * C, words = words_of<Floats, F32>(E);
  float* m = m_memory.get<float>(T * J + T);
  float* norm = m + T * J;
  Weight w{(const u8*)fn, nullptr, J, E, F32, NO_SCALE, 1, 1};
  Rows rows{streams, E, dtype};
  Quant none{NONE, 0, 0};
  auto widen_row = [&](i64 t, u32* to) {
    prepare_row<Floats>(rows, t, E, words, none, to);
    norm[t] = 1.0f / sqrtf(square_sum((const float*)to, E) / E + norm_eps);
  };
  Factors<Floats> factors(w, nullptr);
  // `few` tokens from t0 on, widened into x, times rows first .. stop of the matrix
  auto widen = [&](auto few, i64 t0, u32* x) {
    for (i64 t = 0; t < few.value; t++) t0 + t < T ? widen_row(t0 + t, x + t * words) : (void)memset(x + t * words, 0, words * 4);
  };
  auto multiply = [&](auto few, i64 t0, const u32* x, i64 first, i64 stop) {
    dot_rows<Floats, F32, few.value>(w, first, stop, factors, (const V*)x, words / VL, [&](i64 row, int t, float value) {
      if (t0 + t < T) m[(t0 + t) * J + row] = value;
    });
  };
  if (T <= 4) {  // the matrix is what takes time: its rows are shared out
    with_few(T, [&](auto few) {
      constexpr int N = few.value <= 4 ? few.value : 4;
      u32* x = rows_memory.get<u32>(N * words);
      widen(SIZE(N), 0, x);
      parallel(threads, (J + 3) / 4, [&](i64 task) { multiply(SIZE(N), 0, x, task * 4, task * 4 + 4 < J ? task * 4 + 4 : J); });
    });
  } else if (T <= MEDIUM) {  // the matrix stays in a cache: four tokens at a time walk it
    parallel(T * E * J < ((i64)1 << 17) ? 1 : threads, (T + 3) / 4, [&](i64 task) {
      SCRATCH(x_memory);
      u32* x = x_memory.get<u32>(4 * words);
      widen(SIZE(4), task * 4, x);
      multiply(SIZE(4), task * 4, x, 0, J);
    });
  } else {
    // tokens are broadcast and the J outputs lie in lanes, so that wide rows stay in the nearest cache
    constexpr i64 TOKENS = 16;
    SCRATCH(fn_memory);
    i64 panels = (J + MAX_LANES - 1) / MAX_LANES;
    u32* lanes = fn_memory.get<u32>(panels * MAX_LANES * words);
    parallel(threads, panels, [&](i64 p) {
      pack_panel<Floats, F32>(Rows{fn, E, FLOAT32}, nullptr, p * MAX_LANES, J - p * MAX_LANES < MAX_LANES ? J - p * MAX_LANES : MAX_LANES,
                         E, words, none, lanes + p * MAX_LANES * words);
    });
    parallel(threads, (T + TOKENS - 1) / TOKENS, [&](i64 task) {
      SCRATCH(tile_memory);
      SCRATCH(row_memory);
      SCRATCH(sums);
      u32 *x = tile_memory.get<u32>((words + KB - 1) / KB * (TOKENS + OVERSHOOT) * LDW), *row = row_memory.get<u32>(words);
      i64 n = T - task * TOKENS < TOKENS ? T - task * TOKENS : TOKENS;
      for (i64 t = 0; t < n; t++) {
        widen_row(task * TOKENS + t, row);
        for (i64 word = 0; word < words; word += VL)
          store(word_of_row(x, TOKENS + OVERSHOOT, t, word), load<V>(row + word));
      }
      for (i64 p = 0; p < panels; p++) {
        int count = count_of(J - p * MAX_LANES);
        V* c = sums.get<V>((TOKENS + OVERSHOOT) * MAX_COUNT);
        product<Floats>(x, TOKENS + OVERSHOOT, n, lanes + p * MAX_LANES * words, count, words, c);
        for (i64 t = 0; t < n; t++)
          for (i64 j = 0; j < count * VL && p * MAX_LANES + j < J; j++)
            m[(task * TOKENS + t) * J + p * MAX_LANES + j] = ((const float*)(c + t * count))[j];
      }
    });
  }
  auto finish = [&](auto size) {
    constexpr int S = size.value;
    over_rows((T + VL - 1) / VL, 2 * VL * J * rounds, threads, [&](i64 first, i64 stop) {  // divisions take twice as long
      for (i64 t0 = first * VL; t0 < stop * VL; t0 += VL) {
        V lanes[S * (2 + S)] = {}, p[S], q[S], c[S][S];
        i64 n = T - t0 < VL ? T - t0 : VL;
        for (i64 i = 0; i < n; i++)
          for (i64 j = 0; j < J; j++) lanes[j][i] = m[(t0 + i) * J + j] * norm[t0 + i];
        mix_lanes<S>(M, lanes, scale, base, hc_eps, rounds, p, q, c);
        for (i64 i = 0; i < n; i++)
          for (int j = 0; j < M; j++) {
            pre[(t0 + i) * M + j] = p[j][i], post[(t0 + i) * M + j] = q[j][i];
            for (int l = 0; l < M; l++) comb[((t0 + i) * M + j) * M + l] = c[j][l][i];
          }
      }
    });
  };
  M == 4 ? finish(SIZE(4)) : finish(SIZE(8));
}

// out [T, M] = sigmoid(m scale + base) + hc_eps, m as in a mix (spec v4 3.3); fn [M, M C].
extern "C" void sg_hyper_head(const void* streams, int dtype, i64 T, i64 M, i64 C, const float* fn, const float* scale,
                             const float* base, float norm_eps, float hc_eps, float* out, int threads) {
  constexpr int FOUR = 4;  // tokens that walk the matrix together
  i64 E = M * C, words = words_of<Floats, F32>(E);
  Weight w{(const u8*)fn, nullptr, M, E, F32, NO_SCALE, 1, 1};
  parallel(T * E * M < ((i64)1 << 17) ? 1 : threads, (T + FOUR - 1) / FOUR, [&](i64 task) {
    SCRATCH(memory);
    u32* x = memory.get<u32>(FOUR * words);
    float norm[FOUR] = {};
    i64 first = task * FOUR, n = T - first < FOUR ? T - first : FOUR;
    for (i64 t = 0; t < n; t++) {
      prepare_row<Floats>(Rows{streams, E, dtype}, first + t, E, words, Quant{NONE, 0, 0}, x + t * words);
      norm[t] = 1.0f / sqrtf(square_sum((const float*)(x + t * words), E) / E + norm_eps);
    }
    memset(x + n * words, 0, (FOUR - n) * words * 4);
    Factors<Floats> factors(w, nullptr);
    dot_rows<Floats, F32, FOUR>(w, 0, M, factors, (const V*)x, words / VL, [&](i64 m, int t, float value) {
      if (t < n) out[(first + t) * M + m] = vsigmoid(splat(value * norm[t] * *scale + base[m]))[0] + hc_eps;
    });
  });
}

// out [T, C] = sum_m pre[t][m] * streams[t][m]
extern "C" void sg_hyper_collapse(const void* streams, int dtype, i64 T_, i64 M, i64 C, const float* pre, void* out_, int threads) {
  typed(dtype, [&](auto type) {
    typedef std::remove_pointer_t<decltype(type)> T;
    auto rows = [&](auto size) {
      over_rows(T_, M * C, threads, [&](i64 first, i64 stop) {
        const int streams_ = size.value ? size.value : M;
        for (i64 t = first; t < stop; t++)
          vectors(C, [&](i64 c, auto left) {
            V total = {};
            for (int m = 0; m < streams_; m++) total += pre[t * M + m] * load_n((const T*)streams + (t * M + m) * C + c, left);
            store_n((T*)out_ + t * C + c, total, left);
          });
      });
    };
    M == 4 ? rows(SIZE(4)) : rows(SIZE(0));
  });
}

// out [T, L, C] = post[t][l] * z[t] + sum_m comb[t][m][l] * streams[t][m], L = M <= 8
extern "C" void sg_hyper_expand(const void* z, const void* streams, int dtype, i64 T_, i64 M, i64 C, const float* post,
                                const float* comb, void* out_, int threads) {
  typed(dtype, [&](auto type) {
    typedef std::remove_pointer_t<decltype(type)> T;
    auto rows = [&](auto size) {
      over_rows(T_, 2 * M * C, threads, [&](i64 first, i64 stop) {
        constexpr int S = size.value;
        for (i64 t = first; t < stop; t++)
          vectors(C, [&](i64 c, auto left) {
            const int streams_ = S == 4 ? 4 : M;
            V x[S], sub = load_n((const T*)z + t * C + c, left);
            for (int m = 0; m < streams_; m++) x[m] = load_n((const T*)streams + (t * M + m) * C + c, left);
            for (int l = 0; l < streams_; l++) {
              V total = {};
              for (int m = 0; m < streams_; m++) total += comb[(t * M + m) * M + l] * x[m];
              store_n((T*)out_ + (t * M + l) * C + c, post[t * M + l] * sub + total, left);
            }
          });
      });
    };
    M == 4 ? rows(SIZE(4)) : rows(SIZE(8));
  });
}

// out [P, D]: softmax over the sources of a row, channel by channel (spec v4 5.1). rows [T, E], state [N, E],
// E = 2 c D holds kv, then gate; with overlap c = 2 and the first half of the sources gives its first D channels.
extern "C" void sg_compress_pool(const float* rows, const float* state, const i32* sources, i64 P, i64 B, i64 E, int overlap,
                                 void* out, int dtype, int threads) {
  i64 D = overlap ? E / 4 : E / 2;
  over_rows(P, B * D * 4, threads, [&](i64 first, i64 stop) {
    SCRATCH(memory);
    const float** kv = memory.get<const float*>(B);
    for (i64 p = first; p < stop; p++) {
      i64 n = 0;
      for (i64 b = 0; b < B; b++) {
        i64 source = sources[p * B + b];
        if (source == -1) continue;
        const float* row = source >= 0 ? rows + source * E : state + (-source - 2) * E;
        kv[n++] = row + (overlap && b >= B / 2 ? D : 0);
      }
      vectors(D, [&](i64 d, auto left) {
        V most = splat(-__builtin_inff()), total = {}, value = {};
        for (i64 i = 0; i < n; i++) most = vmax(load_n(kv[i] + E / 2 + d, left), most);
        for (i64 i = 0; i < n; i++) {
          V weight = vexp(load_n(kv[i] + E / 2 + d, left) - most);
          total += weight;
          value += weight * load_n(kv[i] + d, left);
        }
        V pooled = n ? value / total : V{};
        dtype == FLOAT32 ? store_n((float*)out + p * D + d, pooled, left) : store_n((bf16*)out + p * D + d, pooled, left);
      });
    }
  });
}

// out [T, 2 E] fp32: kv, then gate + ape[phase[t]]; ape [ratio, E] may be null.
extern "C" void sg_compress_rows(const float* kv, const float* gate, const float* ape, const i64* phase, i64 T, i64 E, float* out, int threads) {
  over_rows(T, 2 * E, threads, [&](i64 first, i64 stop) {
    for (i64 t = first; t < stop; t++) {
      memcpy(out + t * 2 * E, kv + t * E, E * 4);
      vectors(E, [&](i64 e, auto left) {
        V value = load_n(gate + t * E + e, left);
        store_n(out + (t * 2 + 1) * E + e, ape ? value + load_n(ape + phase[t] * E + e, left) : value, left);
      });
    }
  });
}

// out [N, F] = silu(min(gate, limit)) * clamp(up, limit), one rounding.
extern "C" void sg_swiglu(const void* gate_, const void* up_, int dtype, i64 N, i64 F, float limit, void* out_, int threads) {
  typed(dtype, [&](auto type) {
    typedef std::remove_pointer_t<decltype(type)> T;
    over_rows(N, F, threads, [&](i64 first, i64 stop) {
      vectors((stop - first) * F, [&](i64 i, auto left) {
        V gate = load_n((const T*)gate_ + first * F + i, left), up = load_n((const T*)up_ + first * F + i, left);
        gate = gate > limit ? splat(limit) : gate;
        up = up > limit ? splat(limit) : up < -limit ? splat(-limit) : up;
        store_n((T*)out_ + first * F + i, gate * vsigmoid(gate) * up, left);
      });
    });
  });
}

// out [N, C] = routed (fp32) + shared, in the dtype of `shared`.
extern "C" void sg_add_shared(const float* routed, const void* shared, int dtype, i64 N, i64 C, void* out, int threads) {
  typed(dtype, [&](auto type) {
    typedef std::remove_pointer_t<decltype(type)> T;
    over_rows(N, C, threads, [&](i64 first, i64 stop) {
      vectors((stop - first) * C, [&](i64 i, auto left) {
        i64 at = first * C + i;
        store_n((T*)out + at, load_n(routed + at, left) + load_n((const T*)shared + at, left), left);
      });
    });
  });
}

// pages[write[t]] = rows[t] for write[t] >= 0, in the pages' dtype.
extern "C" void sg_cache_write(void* pages, int page_dtype, const void* rows, int row_dtype, i64 T_, i64 D, const i64* write, int threads) {
  typed(page_dtype, [&](auto to) {
    typed(row_dtype, [&](auto from) {
      typedef std::remove_pointer_t<decltype(to)> To;
      typedef std::remove_pointer_t<decltype(from)> From;
      over_rows(T_, D, threads, [&](i64 first, i64 stop) {
        for (i64 t = first; t < stop; t++) {
          if (write[t] < 0) continue;
          To* out = (To*)pages + write[t] * D;
          const From* x = (const From*)rows + t * D;
          if (sizeof(To) == sizeof(From)) memcpy((void*)out, x, D * sizeof(To));
          else
            vectors(D, [&](i64 i, auto left) { store_n(out + i, load_n(x + i, left), left); });
        }
      });
    });
  });
}

// sqrt(ln(1 + e^z)) = sqrt(max(z, 0) + ln(1 + u)), u = e^-|z|; ln(1 + u) = 2 artanh(u / (2 + u)) as a series.
INLINE V root_of_softplus(V z) {
  V u = vexp(-vabs(z)), s = u / (2.0f + u), square = s * s;
  V series = splat(1.0f / 15);
  for (int odd = 13; odd > 0; odd -= 2) series = series * square + 1.0f / odd;
  V value = vmax(z, V{}) + 2.0f * s * series;
  for (int i = 0; i < VL; i++) value[i] = sqrtf(value[i]);
  return value;
}

// s = sqrt(softplus(x W^T)); ids [T, K] the best of s + bias (or row `row[t]` of `forced`, row t without `row`), weights [T, K] = scale * s / sum s.
// A padding row (position[t] < 0) gets ids -1 and weights 0.
extern "C" void sg_router(const void* x, int dtype, i64 T, i64 C, const void* weight, int weight_dtype, i64 E, i64 K, float scale,
                          const float* bias, const float* image_bias, const u8* image, const i32* forced, const i64* row,
                          const i32* position, i32* ids, float* weights, int threads) {
  SCRATCH(memory);
  float* scores = memory.get<float>(T * E);
  Weight w{(const u8*)weight, nullptr, E, C, weight_dtype == FLOAT32 ? F32 : BF16, NO_SCALE, 1, 1};
  linear(w, Rows{x, C, dtype}, T, 1, Quant{NONE, 0, 0}, Output{scores, E, FLOAT32, nullptr, nullptr}, threads);
  over_rows(T, 8 * E, threads, [&](i64 first, i64 stop) {
    SCRATCH(rank_memory);
    float* rank = rank_memory.get<float>(E);
    for (i64 t = first; t < stop; t++) {
      if (position && position[t] < 0) {
        for (i64 k = 0; k < K; k++) ids[t * K + k] = -1, weights[t * K + k] = 0;
        continue;
      }
      float* s = scores + t * E;
      bool is_image = image && image[t];
      const float* add = is_image ? image_bias : bias;
      vectors(E, [&](i64 e, auto left) {
        V score = root_of_softplus(load_n(s + e, left));
        store_n(s + e, score, left);
        store_n(rank + e, add ? score + load_n(add + e, left) : score, left);
      });
      float total = 0;
      for (i64 k = 0; k < K; k++) {
        i64 best = -1;
        if (forced && !is_image) best = forced[(row ? row[t] : t) * K + k];
        else {
          for (i64 e = 0; e < E; e++)
            if (rank[e] == rank[e] && (best < 0 || rank[e] > rank[best])) best = e;  // a taken one is NaN
          best = best < 0 ? 0 : best;
          rank[best] = __builtin_nanf("");
        }
        ids[t * K + k] = best;
        total += weights[t * K + k] = s[best];
      }
      for (i64 k = 0; k < K; k++) weights[t * K + k] = weights[t * K + k] / total * scale;
    }
  });
}

// out [T, G, O] = sum of scale_r * (a_r . x [t, g]) * b [r, g] over the rank rows of adapter[t] (int32; of_rank[r] is whose row r is).
extern "C" void sg_lora_delta(const void* x_, int dtype, i64 T_, i64 G, i64 I, const i32* adapter, const float* a, const float* b,
                              const i32* of_rank, const float* scale, i64 R, i64 O, float* out, int threads) {
  typed(dtype, [&](auto type) {
    typedef std::remove_pointer_t<decltype(type)> T;
    over_rows(T_, G * (I + O), threads, [&](i64 first, i64 stop) {
      for (i64 t = first; t < stop; t++) {
        memset(out + t * G * O, 0, G * O * sizeof(float));
        for (i64 r = 0; r < R; r++) {
          if (of_rank[r] != adapter[t]) continue;
          for (i64 g = 0; g < G; g++) {
            float u = dot_n(a + r * I, (const T*)x_ + (t * G + g) * I, I) * scale[r];
            add_n(u, b + (r * G + g) * O, O, out + (t * G + g) * O);
          }
        }
      }
    });
  });
}

// The gate of an n-gram memory (spec v41 5.4): both [T, (M + 1) * C] holds M keys and one value per row.
// out_m = h_m + sigmoid(sign(d_m) sqrt(max(|d_m|, 1e-6))) * value, d_m = sum h q k key * rsqrt(mean h^2 + eps) * rsqrt(mean key^2 + eps) / sqrt(C)
extern "C" void sg_engram_gate(const void* streams, int dtype, i64 T_, i64 M, i64 C, const void* both_, const float* q, const float* k,
                               const u8* closed, float eps, void* out_, int threads) {
  typed(dtype, [&](auto type) {
    typedef std::remove_pointer_t<decltype(type)> T;
    over_rows(T_, 3 * M * C, threads, [&](i64 first, i64 stop) {
      for (i64 t = first; t < stop; t++) {
        const T *keys = (const T*)both_ + t * (M + 1) * C, *value = keys + M * C;
        for (i64 m = 0; m < M; m++) {
          const T *h = (const T*)streams + (t * M + m) * C, *key = keys + m * C;
          float gate = 0;
          if (!closed || !closed[t]) {
            V dots = {}, squares = {}, key_squares = {};
            vectors(C, [&](i64 c, auto left) {
              V x = load_n(h + c, left), y = load_n(key + c, left);
              dots += x * (load_n(q + m * C + c, left) * load_n(k + m * C + c, left)) * y;
              squares += x * x, key_squares += y * y;
            });
            float d = sum(dots) / sqrtf(sum(squares) / C + eps) / sqrtf(sum(key_squares) / C + eps) / sqrtf((float)C);
            float root = sqrtf(fmaxf(fabsf(d), 1e-6f));
            gate = vsigmoid(splat(copysignf(root, d)))[0];
          }
          vectors(C, [&](i64 c, auto left) {
            store_n((T*)out_ + (t * M + m) * C + c, load_n(h + c, left) + gate * load_n(value + c, left), left);
          });
        }
      }
    });
  });
}

ON_TAPE(sg_lora_delta)
ON_TAPE(sg_engram_gate)
ON_TAPE(sg_router)
ON_TAPE(sg_compress_pool)
ON_TAPE(sg_compress_rows)
ON_TAPE(sg_hyper_mix)
ON_TAPE(sg_hyper_head)
ON_TAPE(sg_hyper_collapse)
ON_TAPE(sg_hyper_expand)
ON_TAPE(sg_rope)
ON_TAPE(sg_rms_norm)
ON_TAPE(sg_fake_quant)
ON_TAPE(sg_hadamard)
ON_TAPE(sg_cache_write)
ON_TAPE(sg_swiglu)
ON_TAPE(sg_add_shared)
