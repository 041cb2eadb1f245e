/* Few rows of activations by matrices of weights, and decoder layers made of such products.
 *
 * Compiled for the machine it runs on (build.py); called through ops.py, which says what every argument is, in torch.
 *
 * Row invariance. What is computed for a row (a token) is the same sequence of floating-point operations however many
 * rows are computed with it and whatever the number of threads: sums run along the inputs in one fixed order, tiles
 * only say how many of these sums are under way at once. Every change here has to keep that.
 *
 * Panels. A matrix is stored as panels of 16 outputs, along its inputs, in 32-bit words that belong to one output each:
 * one float32, two bfloat16, four int8, or eight nibbles, the first four inputs in the low halves of its bytes; float16
 * lies bare, 16 numbers for each input. So vectors lie along the outputs, an input is broadcast, and a sum never has to
 * be added across a vector. Quantized formats have blocks of 32 inputs, the panel's 16 scales first (and 16 least values,
 * for Q4_1). matrix.py packs them.
 */
#include <math.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_num_threads(void) { return 1; }
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define PANEL 16
#define VECS (PANEL / LANES)
#define BLOCK 32
/* Rows and panels that fill the registers: at most SMALL rows, at most WIDE panels; of rows in int8 more. */
#define SMALL 6
#define SMALL_INT8 8
#define WIDE 4
#define INLINE static inline __attribute__((always_inline))
#define NOINLINE __attribute__((noinline))
#ifdef __clang__
#define UNROLL _Pragma("unroll")
#define ROLLED _Pragma("nounroll")
#else
#define UNROLL _Pragma("GCC unroll 64")
#define ROLLED _Pragma("GCC unroll 1")
#endif

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef vec vec_at __attribute__((aligned(4), may_alias));
typedef ivec ivec_at __attribute__((aligned(4), may_alias));
typedef int32_t word_at __attribute__((may_alias));

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif

INLINE vec load(const float *p) { return *(const vec_at *)p; }
INLINE void store(float *p, vec v) { *(vec_at *)p = v; }
INLINE ivec words(const uint8_t *at, size_t offset, int v) { return *(const ivec_at *)(at + offset + 4 * LANES * v); }
INLINE vec all(float x) { return x - (vec){0}; }
INLINE void clear(float *to, long size) {
    for (long i = 0; i < size; i += LANES) store(to + i, all(0));
}
INLINE vec choose(ivec mask, vec a, vec b) { return (vec)((mask & (ivec)a) | (~mask & (ivec)b)); }

INLINE float total(vec v) {
    float sum = 0;
    UNROLL for (int i = 0; i < LANES; i++) sum += v[i];
    return sum;
}

INLINE ivec larger(ivec a, ivec b) {
    const ivec mask = a > b;
    return (mask & a) | (~mask & b);
}

/* Lane i of the result is the sum of v[i], or its largest lane, of numbers without a sign: halves of pairs are joined until
 * one vector is left. */
#define LOW(i, h) ((i) & (h) ? LANES + (i) - (h) : (i))
#define FOUR(o, h, d) LOW(o, h) + d, LOW(o + 1, h) + d, LOW(o + 2, h) + d, LOW(o + 3, h) + d
#if LANES == 4
#define INDICES(h, d) FOUR(0, h, d)
#elif LANES == 8
#define INDICES(h, d) FOUR(0, h, d), FOUR(4, h, d)
#else
#define INDICES(h, d) FOUR(0, h, d), FOUR(4, h, d), FOUR(8, h, d), FOUR(12, h, d)
#endif
#if LANES == 4
#define FOLD_MORE
#elif LANES == 8
#define FOLD_MORE FOLD(4)
#else
#define FOLD_MORE FOLD(4) FOLD(8)
#endif
#define FOLD(h)                                                                                                        \
    UNROLL for (int i = 0; i < LANES; i += 2 * h) {                                                       \
        const vec a = SHUFFLE(v[i], v[i + h], INDICES(h, 0)), b = SHUFFLE(v[i], v[i + h], INDICES(h, h));              \
        v[i] = JOIN(a, b);                                                                                             \
    }
INLINE vec totals_of(vec v[LANES]) {
#define JOIN(a, b) a + b
    FOLD(1) FOLD(2) FOLD_MORE
    return v[0];
#undef JOIN
}
INLINE vec largest_of(vec v[LANES]) {
#define JOIN(a, b) (vec)larger((ivec)a, (ivec)b)
    FOLD(1) FOLD(2) FOLD_MORE
    return v[0];
#undef JOIN
}

/* LANES float16 numbers. */
INLINE vec halves(const uint8_t *p) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__F16C__)
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif defined(__ARM_NEON)
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p)));
#else
    vec out;
    for (int i = 0; i < LANES; i++) {
        uint16_t h;
        memcpy(&h, p + 2 * i, 2);
        /* The exponent is moved as if it were float32's and put right by a multiplication, subnormals included. */
        union { uint32_t u; float f; } bits = {.u = (uint32_t)(h & 0x7fff) << 13};
        bits.f = (h & 0x7c00) == 0x7c00 ? (h & 0x3ff ? NAN : INFINITY) : bits.f * 0x1p112f;
        out[i] = h & 0x8000 ? -bits.f : bits.f;
    }
    return out;
#endif
}

/* e^x to about one unit in the last place; 0 below -87. */
INLINE vec exponential(vec x) {
    const float magic = 0x1.8p23f;
    vec clamped = choose(x < -87.0f, all(-87.0f), choose(x > 88.0f, all(88.0f), x));
    vec shifted = clamped * 1.44269504f + magic, n = shifted - magic;
    vec r = clamped - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vec p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    vec power = (vec)(((ivec)shifted << 23) + (127 << 23));
    return choose(x < -87.0f, all(0.0f), p * power);
}

/* ---- matrices ---- */

enum { FLOAT32, BFLOAT16, FLOAT16, Q8_0, Q4_0, Q4_1 };

typedef struct {
    const uint8_t *data;
    const float *bias; /* or null */
    int32_t format, inputs, outputs;
    int32_t int8_inputs; /* what a matrix in blocks multiplies is rounded to int8 first, see `rounded` */
} Matrix;

INLINE int is_quantized(int format) { return format >= Q8_0; }
INLINE int has_nibbles(int format) { return format >= Q4_0; }
INLINE int header_bytes(int format) { return format == Q4_1 ? 4 * PANEL : is_quantized(format) ? 2 * PANEL : 0; }
INLINE int block_bytes(int format) {
    return header_bytes(format) + PANEL * BLOCK * (format == FLOAT32 ? 8 : format == Q8_0 ? 2 : format >= Q4_0 ? 1 : 4) / 2;
}

/* Byte j of each word as a float times 2^24, which the block's scale takes back: it need not be moved to the bottom. */
#define FROM_BYTE 0x1p-24f
INLINE vec byte(ivec w, int j) {
    if (j == 3) return __builtin_convertvector(w & (int32_t)0xff000000, vec);
#if defined(__AVX2__) && LANES == 8
    const int32_t at = (j << 24) + 0x808080; /* byte j on top, zeros below */
    const ivec order = {at, at + (4 << 24), at + (8 << 24), at + (12 << 24), at, at + (4 << 24), at + (8 << 24), at + (12 << 24)};
    return __builtin_convertvector((ivec)_mm256_shuffle_epi8((__m256i)w, (__m256i)order), vec);
#else
    return __builtin_convertvector(j == 0 ? w << 24 : (w << (24 - 8 * j)) & (int32_t)0xff000000, vec);
#endif
}

/* Input j of a word of nibbles, where it is: as a float that is too large by a power of two, which the inputs take back
 * (`scaled`). That saves two shifts of three operations. Only the topmost nibble has to leave the sign's place. */
INLINE vec nibble(ivec w, int j) {
    const int at = j < 4 ? 8 * j : j < 7 ? 8 * j - 28 : 24;
    return __builtin_convertvector((j == 7 ? w >> 4 : w) & (0xf << at), vec);
}

/* The inputs of a matrix of nibbles: [size], each divided by the power of two that its weight is too large by. */
static void scaled(const float *x, int size, float *to) {
    static const float factors[8] = {1, 0x1p-8f, 0x1p-16f, 0x1p-24f, 0x1p-4f, 0x1p-12f, 0x1p-20f, 0x1p-24f};
    for (int i = 0; i < size; i += 8)
        for (int j = 0; j < 8; j++) to[i + j] = x[i + j] * factors[j];
}

/* One stream of memory is less than the machine can follow by itself (of several it follows enough). What is fetched ahead
 * is asked for a few lines at a time: a whole block at once would fill up what keeps track of lines under way. */
INLINE void fetch(const uint8_t *at, int bytes) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(at + i + 2048);
}

/* DO(p, k) with weight[v] for every input k of a block of 32 and every panel p; `at` is where the words of the
 * first panel's block begin, the panels are `stride` bytes apart. `ahead`: what follows them is fetched. */
#define EACH_WEIGHT(format, panels, at, stride, ahead, DO)                                                             \
    if (format == FLOAT32) {                                                                                           \
        ROLLED for (int k = 0; k < BLOCK; k += 4, at += 4 * 64) {                                                      \
            if (ahead) fetch(at, 4 * 64);                                                                              \
            UNROLL for (int j = 0; j < 4; j++) EACH_VEC(panels, DO, k + j, (vec)words(at + 64 * j, p * stride, v))     \
        }                                                                                                              \
    } else if (format == BFLOAT16) {                                                                                   \
        ROLLED for (int k = 0; k < BLOCK; k += 4, at += 2 * 64) {                                                      \
            if (ahead) fetch(at, 2 * 64);                                                                              \
            UNROLL for (int j = 0; j < 4; j += 2) {                                                                    \
                EACH_VEC(panels, DO, k + j, (vec)(words(at + 32 * j, p * stride, v) << 16))                            \
                EACH_VEC(panels, DO, k + j + 1, (vec)(words(at + 32 * j, p * stride, v) & (int32_t)0xffff0000))        \
            }                                                                                                          \
        }                                                                                                              \
    } else if (format == FLOAT16) {                                                                                    \
        ROLLED for (int k = 0; k < BLOCK; k += 4, at += 2 * 64) {                                                      \
            if (ahead) fetch(at, 2 * 64);                                                                              \
            UNROLL for (int j = 0; j < 4; j++)                                                                         \
                EACH_VEC(panels, DO, k + j, halves(at + 32 * j + p * stride + 2 * LANES * v))                          \
        }                                                                                                              \
    } else if (format == Q8_0) {                                                                                       \
        ROLLED for (int k = 0; k < BLOCK; k += 4, at += 64) {                                                          \
            if (ahead) fetch(at, 64);                                                                                  \
            UNROLL for (int j = 0; j < 4; j++) EACH_VEC(panels, DO, k + j, byte(words(at, p * stride, v), j))          \
        }                                                                                                              \
    } else {                                                                                                           \
        ROLLED for (int k = 0; k < BLOCK; k += 8, at += 64) {                                                          \
            if (ahead) fetch(at, 64);                                                                                  \
            UNROLL for (int j = 0; j < 8; j++) EACH_VEC(panels, DO, k + j, nibble(words(at, p * stride, v), j))        \
        }                                                                                                              \
    }
#define EACH_VEC(panels, DO, k, value)                                                                                 \
    UNROLL for (int p = 0; p < panels; p++) {                                                                          \
        vec weight[VECS];                                                                                              \
        UNROLL for (int v = 0; v < VECS; v++) weight[v] = value;                                                       \
        DO(p, k)                                                                                                       \
    }

/* One block of 32 inputs as floats, [32][16]. */
INLINE void unpack(int format, const uint8_t *at, float *to) {
#define STORE(p, k) UNROLL for (int v = 0; v < VECS; v++) store(to + (k) * PANEL + v * LANES, weight[v]);
    EACH_WEIGHT(format, 1, at, 0, 1, STORE)
}

/* What is the same for every tile of a product. */
typedef struct {
    const uint8_t *data;    /* of the first panel */
    size_t stride;          /* bytes from panel to panel */
    const float *x;         /* of the first row */
    size_t ldx;
    const int8_t *integers; /* or these, [blocks][rows][32], */
    const float *scales;    /* [blocks][rows], times their scales */
    const int32_t *sums;    /* [blocks][rows], of the integers */
    const float *totals;    /* [blocks][rows], sums of each block of 32 inputs; for Q4_0 and Q4_1 */
    size_t rows;            /* that were made for all tiles, at least those of this one */
} Operands;

/* acc += w x for `blocks` blocks of 32 inputs, `rows` rows, `panels` panels. Weights come from `floats`, unpacked, or
 * from the matrix itself where that is null; scales always from the matrix. acc is [rows][panels][16]. */
INLINE void tile(int format, int rows, int panels, int blocks, const Operands *o, const float *floats, float *acc_at) {
    const int bytes = block_bytes(format), header = header_bytes(format);
    vec acc[SMALL][WIDE][VECS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < panels; p++)
            UNROLL for (int v = 0; v < VECS; v++) acc[r][p][v] = load(acc_at + (r * panels + p) * PANEL + v * LANES);
    for (int b = 0; b < blocks; b++) {
        const uint8_t *w = o->data + (size_t)b * bytes;
        const float *x = o->x + BLOCK * b;
        const size_t ldx = o->ldx;
#define ADD(p, k)                                                                                                      \
    UNROLL for (int r = 0; r < rows; r++) {                                                                            \
        vec input = all(x[r * ldx + (k)]);                                                                             \
        UNROLL for (int v = 0; v < VECS; v++) sum[r][p][v] += weight[v] * input;                                       \
    }
#define EACH_SUM_OF_WEIGHTS                                                                                            \
    if (floats) { EACH_WEIGHT(FLOAT32, panels, at, 0, 0, ADD) }                                                        \
    else { EACH_WEIGHT(format, panels, at, o->stride, panels == 1, ADD) }
        const uint8_t *at = floats ? (const uint8_t *)(floats + b * BLOCK * PANEL) : w + header;
        if (!is_quantized(format)) {
#define sum acc
            EACH_SUM_OF_WEIGHTS
#undef sum
            continue;
        }
        vec sum[SMALL][WIDE][VECS];
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int p = 0; p < panels; p++)
                UNROLL for (int v = 0; v < VECS; v++)
                    sum[r][p][v] = format == Q4_0 ? all(-8 * o->totals[b * o->rows + r]) : all(0);
        EACH_SUM_OF_WEIGHTS
        UNROLL for (int p = 0; p < panels; p++)
            UNROLL for (int v = 0; v < VECS; v++) {
                const uint8_t *at = w + p * o->stride + 2 * LANES * v;
                vec scale = has_nibbles(format) ? halves(at) : halves(at) * FROM_BYTE;
                UNROLL for (int r = 0; r < rows; r++) acc[r][p][v] += scale * sum[r][p][v];
                if (format == Q4_1) {
                    vec least = halves(at + 2 * PANEL);
                    UNROLL for (int r = 0; r < rows; r++) acc[r][p][v] += least * o->totals[b * o->rows + r];
                }
            }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < panels; p++)
            UNROLL for (int v = 0; v < VECS; v++) store(acc_at + (r * panels + p) * PANEL + v * LANES, acc[r][p][v]);
}

/* ---- inputs in int8 ---- */

/* A block of small integers as bytes. */
INLINE void store_bytes(const ivec integers[BLOCK / LANES], int8_t *to) {
#if defined(__AVX2__) && LANES == 8
    const __m256i *at = (const __m256i *)integers;
    const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(at[0], at[1]), _mm256_packs_epi32(at[2], at[3]));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7); /* packing goes on in each half by itself */
    _mm256_storeu_si256((__m256i *)to, _mm256_permutevar8x32_epi32(bytes, order));
#else
    UNROLL for (int i = 0; i < BLOCK; i++) to[i] = (int8_t)integers[i / LANES][i % LANES];
#endif
}

/* A row with each block of 32 inputs as integers from -127 to 127 times a scale, the largest input over 127, rounded to
 * even; totals are those of what is left. As every format of weights is made of small integers too, their products are
 * exact, and one instruction adds up two or four of them. A block that is not finite has a scale that is NaN, and so have
 * all the row's results. They are those of one of `rows` rows; LANES blocks are rounded at a time. */
static void rounded(const float *x, int size, size_t rows, int8_t *to, float *scales, float *totals, int32_t *sums) {
    const float magic = 0x1.8p23f; /* leaves the integer in the lowest bits */
    const int blocks = size / BLOCK;
    for (int begin = 0; begin < blocks; begin += LANES) {
        const int count = blocks - begin < LANES ? blocks - begin : LANES;
        vec each[LANES];
        UNROLL for (int l = 0; l < LANES; l++) {
            const float *from = x + (begin + (l < count ? l : 0)) * BLOCK;
            ivec largest = {0}; /* numbers without a sign are in the order of their bits, and NaN is the largest */
            for (int i = 0; i < BLOCK; i += LANES) largest = larger(largest, (ivec)load(from + i) & 0x7fffffff);
            each[l] = (vec)largest;
        }
        const vec most = largest_of(each);
        const vec inverse = choose(most > 0x1p-120f, 127.0f / most, all(0));
        const vec scale = choose((ivec)most < 0x7f800000, most / 127.0f, all(NAN));
        UNROLL for (int l = 0; l < LANES; l++) {
            const int b = begin + (l < count ? l : 0);
            vec sum = {0};
            ivec integers[BLOCK / LANES];
            UNROLL for (int i = 0; i < BLOCK / LANES; i++) {
                const vec shifted = load(x + b * BLOCK + i * LANES) * inverse[l] + magic;
                sum += shifted - magic;
                integers[i] = (ivec)shifted - (ivec)all(magic);
            }
            each[l] = sum;
            store_bytes(integers, to + b * rows * BLOCK);
        }
        const vec sum = totals_of(each), sum_left = sum * scale;
        for (int l = 0; l < count; l++) {
            const size_t at = (begin + l) * rows;
            scales[at] = scale[l], totals[at] = sum_left[l], sums[at] = (int32_t)sum[l];
        }
    }
}

/* sum + the four products of words of unsigned bytes with words of signed ones, where there is an instruction for it. */
#if defined(__AVX512VNNI__) && LANES == 16
#define DOT(sum, w, x) (ivec)_mm512_dpbusd_epi32((__m512i)(sum), (__m512i)(w), (__m512i)(x))
#elif defined(__AVXVNNI__) && LANES == 8
#define DOT(sum, w, x) (ivec)_mm256_dpbusd_avx_epi32((__m256i)(sum), (__m256i)(w), (__m256i)(x))
#endif

/* sums[r][v] = the products of one block of 32 inputs and vector v of `vecs` of a panel with rows of integers: exact, in
 * any order. The loops along the inputs stay loops: unrolled, compilers move all products ahead of the sums and run out of
 * registers. */
INLINE void block_dots(int format, int rows, int vecs, const uint8_t *w, const int8_t *x, const int32_t *of_x,
                       ivec sums[SMALL_INT8][VECS]) {
#define EACH_WORD UNROLL for (int v = 0; v < vecs; v++)
#define EACH_SUM UNROLL for (int r = 0; r < rows; r++) EACH_WORD
#define FOUR_INPUTS(k) ((ivec){0} + *(const word_at *)(x + r * BLOCK + (k)))
    ivec low[VECS], high[VECS];
    (void)of_x, (void)low, (void)high;
#if defined(__AVX2__) && LANES == 8 && !defined(DOT)
#define PAIRS(w, x) _mm256_maddubs_epi16((__m256i)(w), (__m256i)(x))
#define FOURS(pairs) (ivec)_mm256_madd_epi16((__m256i)(pairs), _mm256_set1_epi16(1))
    if (format == Q8_0) {
        EACH_SUM sums[r][v] = (ivec){0};
        ROLLED for (int k = 0; k < BLOCK; k += 4, w += 64) {
            /* The weights' signs go to x, which has no -128. 128 x 127 x 2 just fits into 16 bits. */
            EACH_WORD low[v] = (ivec)_mm256_abs_epi8((__m256i)words(w, 0, v));
            EACH_SUM sums[r][v] += FOURS(PAIRS(low[v], _mm256_sign_epi8((__m256i)FOUR_INPUTS(k), (__m256i)words(w, 0, v))));
        }
        return;
    }
    /* So do all sixteen products of 15 and 127 that each 16 bits get. */
    typedef int16_t shorts __attribute__((vector_size(32)));
    shorts pairs[SMALL_INT8][VECS];
    EACH_SUM pairs[r][v] = (shorts){0};
    ROLLED for (int k = 0; k < BLOCK; k += 8, w += 64) {
#define ADD_NOW __asm__("" : "+x"(pairs[r][v])) /* and not together with what is behind: that takes more registers */
        EACH_WORD low[v] = words(w, 0, v) & 0x0f0f0f0f;
        EACH_SUM {
            pairs[r][v] += (shorts)PAIRS(low[v], FOUR_INPUTS(k));
            ADD_NOW;
        }
        EACH_WORD high[v] = words(w, 0, v) >> 4 & 0x0f0f0f0f;
        EACH_SUM {
            pairs[r][v] += (shorts)PAIRS(high[v], FOUR_INPUTS(k + 4));
            ADD_NOW;
        }
    }
    EACH_SUM sums[r][v] = FOURS(pairs[r][v]);
#elif defined(DOT) || (defined(__ARM_FEATURE_DOTPROD) && LANES == 4)
#ifdef DOT
#define MORE 128 /* weights of Q8_0 are more by that, so that they have no sign */
#else
#define MORE 0
#define DOT(sum, w, x) (ivec)vdotq_s32((int32x4_t)(sum), (int8x16_t)(w), (int8x16_t)(x))
#endif
    EACH_SUM sums[r][v] = (ivec){0} - (format == Q8_0 ? MORE * of_x[r] : 0);
    ROLLED for (int k = 0; k < BLOCK; k += format == Q8_0 ? 4 : 8, w += 64) {
        EACH_WORD low[v] = format == Q8_0 ? words(w, 0, v) ^ (int32_t)(MORE * 0x01010101u) : words(w, 0, v) & 0x0f0f0f0f;
        EACH_SUM sums[r][v] = DOT(sums[r][v], low[v], FOUR_INPUTS(k));
        if (format == Q8_0) continue;
        EACH_WORD high[v] = words(w, 0, v) >> 4 & 0x0f0f0f0f;
        EACH_SUM sums[r][v] = DOT(sums[r][v], high[v], FOUR_INPUTS(k + 4));
    }
#else
    EACH_SUM sums[r][v] = (ivec){0};
    for (int k = 0; k < BLOCK; k++)
        EACH_WORD {
            const ivec word = words(w, format == Q8_0 ? k / 4 * 64 : k / 8 * 64, v);
            const int at = 8 * (k % 4);
            const ivec weight = format == Q8_0 ? word << (24 - at) >> 24 : word >> at >> (k % 8 < 4 ? 0 : 4) & 15;
            UNROLL for (int r = 0; r < rows; r++) sums[r][v] += weight * x[r * BLOCK + k];
        }
#endif
}

/* `tile`, of integers. Few values are under way at once, so panels are no part of what has to fit into registers: they
 * are as many streams of memory. Of many rows one vector of outputs fits at a time. */
INLINE void int8_tile(int format, int rows, int panels, int blocks, const Operands *o, float *acc) {
    const int bytes = block_bytes(format), header = header_bytes(format), vecs = has_nibbles(format) && rows > SMALL ? 1 : VECS;
    const Operands at = *o; /* where no store can change it */
    for (int b = 0; b < blocks; b++) {
        const size_t made = b * at.rows;
        ROLLED for (int p = 0; p < panels; p++) {
            const uint8_t *w = at.data + p * at.stride + (size_t)b * bytes;
            if (panels == 1) fetch(w, bytes);
            ROLLED for (int first = 0; first < PANEL; first += vecs * LANES) {
                ivec sums[SMALL_INT8][VECS];
                block_dots(format, rows, vecs, w + header + 4 * first, at.integers + made * BLOCK, at.sums + made, sums);
                vec scale[VECS], least[VECS];
                EACH_WORD {
                    scale[v] = halves(w + 2 * (first + v * LANES));
                    least[v] = format == Q4_1 ? halves(w + 2 * (first + v * LANES) + 2 * PANEL) : scale[v] * -8.0f;
                }
                UNROLL for (int r = 0; r < rows; r++) {
                    const vec of_x = all(at.scales[made + r]), total_of_x = all(at.totals[made + r]);
                    EACH_WORD {
                        float *to = acc + (r * panels + p) * PANEL + first + v * LANES;
                        const vec sum = load(to) + scale[v] * of_x * __builtin_convertvector(sums[r][v], vec);
                        store(to, has_nibbles(format) ? sum + least[v] * total_of_x : sum);
                    }
                }
            }
        }
    }
}

/* ---- products ---- */

/* Memory of this thread that lasts; what it held is lost when it grows. */
static void *scratch(int which, size_t bytes) {
    static _Thread_local struct { void *at; size_t bytes; } held[3];
    if (held[which].bytes < bytes) {
        free(held[which].at);
        held[which].at = aligned_alloc(64, (bytes + 4095) / 4096 * 4096);
        held[which].bytes = bytes;
    }
    return held[which].at;
}

/* Where a product goes: y[r][o] = sum + bias + residual, the last two where there are any. */
typedef struct {
    float *y;
    const float *residual;
    size_t ldy;
} Result;

static void finish(const Matrix *w, const Result *to, int rows, int panels, int panel, const float *acc) {
    const float *bias = w->bias, *residual = to->residual;
    for (int p = 0; p < panels; p++) {
        const int first = (panel + p) * PANEL, left = w->outputs - first;
        for (int r = 0; r < rows; r++) {
            const size_t at = r * to->ldy + first;
            const float *sums = acc + (r * panels + p) * PANEL;
            if (left >= PANEL)
                UNROLL for (int v = 0; v < PANEL; v += LANES) {
                    vec sum = load(sums + v);
                    if (bias) sum += load(bias + first + v);
                    if (residual) sum += load(residual + at + v);
                    store(to->y + at + v, sum);
                }
            else /* the last panel may hold outputs that are none */
                for (int i = 0; i < left; i++) {
                    const float sum = bias ? sums[i] + bias[first + i] : sums[i];
                    to->y[at + i] = residual ? sum + residual[at + i] : sum;
                }
        }
    }
}

#define FORMATS(DO) DO(FLOAT32) DO(BFLOAT16) DO(FLOAT16) DO(Q8_0) DO(Q4_0) DO(Q4_1)
#define EACH_ROWS(DO, f) DO(f, 1, 1) DO(f, 2, 1) DO(f, 3, 1) DO(f, 4, 1) DO(f, 5, 1) DO(f, 6, 1)
#define ROWS_OF_A_TILE(DO, f) EACH_ROWS(DO, f) DO(f, 1, 4)
#define TILES_OF_TWO_PANELS(DO) DO(FLOAT32, 2, 2) DO(FLOAT32, 3, 2) DO(BFLOAT16, 2, 2) DO(FLOAT16, 2, 2)

/* Functions of their own: inlined into one, they are too much for a compiler's register allocation. */
#define DIRECT(f, rows, panels)                                                                                        \
    static NOINLINE void direct_##f##_##rows##_##panels(int blocks, const Operands *o, float *acc) {                   \
        tile(f, rows, panels, blocks, o, 0, acc);                                                                      \
    }
#define UNPACKED(f, rows, panels)                                                                                      \
    static NOINLINE void unpacked_##f##_##rows##_##panels(int blocks, const Operands *o, const float *at, float *acc) { \
        tile(f, rows, 1, blocks, o, at, acc);                                                                          \
    }
#define DEFINE_DIRECT(f) ROWS_OF_A_TILE(DIRECT, f)
FORMATS(DEFINE_DIRECT) TILES_OF_TWO_PANELS(DIRECT)
EACH_ROWS(UNPACKED, FLOAT32) EACH_ROWS(UNPACKED, Q8_0) EACH_ROWS(UNPACKED, Q4_0) EACH_ROWS(UNPACKED, Q4_1)

#define KEY(format, rows, panels) (((format) * 16 + (rows)) * 8 + (panels))

static void direct(int format, int rows, int panels, int blocks, const Operands *o, float *acc) {
    switch (KEY(format, rows, panels)) {
#define CALL(f, rows, panels) case KEY(f, rows, panels): direct_##f##_##rows##_##panels(blocks, o, acc); break;
#define CALLS(f) ROWS_OF_A_TILE(CALL, f)
        FORMATS(CALLS) TILES_OF_TWO_PANELS(CALL)
    }
}

#define INTEGERS(f, rows, _)                                                                                           \
    static NOINLINE void integers_##f##_##rows(int panels, int blocks, const Operands *o, float *acc) {                \
        int8_tile(f, rows, panels, blocks, o, acc);                                                                    \
    }
#define BLOCK_FORMATS(DO) DO(Q8_0) DO(Q4_0) DO(Q4_1)
#define EACH_ROWS_INT8(DO, f) EACH_ROWS(DO, f) DO(f, 7, 1) DO(f, 8, 1)
#define DEFINE_INTEGERS(f) EACH_ROWS_INT8(INTEGERS, f)
BLOCK_FORMATS(DEFINE_INTEGERS)

static void integers(int format, int rows, int panels, int blocks, const Operands *o, float *acc) {
    switch (KEY(format, rows, 1)) {
#define CALL_INTEGERS(f, rows, _) case KEY(f, rows, 1): integers_##f##_##rows(panels, blocks, o, acc); break;
#define CALLS_OF_INTEGERS(f) EACH_ROWS_INT8(CALL_INTEGERS, f)
        BLOCK_FORMATS(CALLS_OF_INTEGERS)
    }
}

static void unpacked(int format, int rows, int blocks, const Operands *o, const float *floats, float *acc) {
    switch (KEY(is_quantized(format) ? format : FLOAT32, rows, 1)) {
#define CALL_UNPACKED(f, rows, panels) case KEY(f, rows, panels): unpacked_##f##_##rows##_1(blocks, o, floats, acc); break;
        EACH_ROWS(CALL_UNPACKED, FLOAT32) EACH_ROWS(CALL_UNPACKED, Q8_0) EACH_ROWS(CALL_UNPACKED, Q4_0)
        EACH_ROWS(CALL_UNPACKED, Q4_1)
    }
}

static void unpack_blocks(int format, int blocks, const uint8_t *at, float *to) {
    for (int i = 0; i < blocks; i++, at += block_bytes(format), to += BLOCK * PANEL) {
        switch (format) {
#define CALL_UNPACK(f) case f: unpack(f, at + header_bytes(f), to); break;
            FORMATS(CALL_UNPACK)
        }
    }
}

/* Rows in tiles as equal as can be, over `blocks` blocks of one panel. */
static void tiles(int format, int rows, int blocks, const Operands *o, const float *floats, float *acc) {
    const int small = o->integers ? SMALL_INT8 : SMALL;
    Operands part = *o;
    for (int done = 0, left = (rows + small - 1) / small; left; left--) {
        int now = (rows - done + left - 1) / left;
        if (o->integers) integers(format, now, 1, blocks, &part, acc + done * PANEL);
        else if (floats) unpacked(format, now, blocks, &part, floats, acc + done * PANEL);
        else direct(format, now, 1, blocks, &part, acc + done * PANEL);
        if (o->integers) part.integers += now * BLOCK, part.scales += now, part.sums += now;
        else part.x += now * o->ldx;
        part.totals += now;
        done += now;
    }
}

/* Rows that are multiplied while their inputs stay in the second cache. */
#define ROWS 96
/* Rows of several tiles take the inputs a slab of blocks at a time, small enough for the first cache; from UNPACK_FROM
 * rows on it pays to unpack the slab once for all tiles. */
#define UNPACK_FROM 13
#define SLAB 4

/* Panels that a tile takes at once, each a stream of memory: as many as leave registers for what turns weights into
 * floats. */
INLINE int panels_of(int format, int rows, int int8_inputs) {
    if (rows == 1) return WIDE; /* which needs several sums under way anyway */
    return !int8_inputs && (format == FLOAT32 ? rows <= 3 : !is_quantized(format) && rows <= 2) ? 2 : 1;
}

/* Panels begin..end of y = x W^T + bias + residual. */
static void share(const Matrix *w, const Operands *x, int rows, Result to, int begin, int end) {
    float floats[SLAB * BLOCK * PANEL] __attribute__((aligned(64))), acc[ROWS * PANEL] __attribute__((aligned(64)));
    const int total = w->inputs / BLOCK, bytes = block_bytes(w->format);
    const int share_floats = rows >= UNPACK_FROM && w->format != FLOAT32 && !x->integers;
    const int slab = w->format == FLOAT32 ? SLAB / 2 : SLAB, small = x->integers ? SMALL_INT8 : SMALL;
    Operands o = *x;
    const int wide = panels_of(w->format, rows, x->integers != 0);
    for (int panel = begin, panels; panel < end; panel += panels) {
        panels = panel + wide <= end ? wide : 1;
        o.data = w->data + panel * o.stride;
        clear(acc, rows * panels * PANEL);
        if (rows <= small && x->integers)
            integers(w->format, rows, panels, total, &o, acc);
        else if (rows <= small)
            direct(w->format, rows, panels, total, &o, acc);
        else
            for (int b = 0, blocks; b < total; b += blocks) {
                blocks = total - b < slab ? total - b : slab;
                Operands part = o;
                part.data += (size_t)b * bytes;
                part.totals += b * o.rows;
                if (o.integers) part.integers += b * o.rows * BLOCK, part.scales += b * o.rows, part.sums += b * o.rows;
                else part.x += b * BLOCK;
                if (share_floats) unpack_blocks(w->format, blocks, part.data, floats);
                tiles(w->format, rows, blocks, &part, share_floats ? floats : 0, acc);
            }
        finish(w, &to, rows, panels, panel, acc);
    }
}

/* ---- threads ---- */

/* Work is cut into items that threads claim one by one, and a phase is over when all of its items are done: so a thread
 * that the system has taken off its processor holds up nobody, unless it holds an item, and passes through what is over when
 * it comes back. Whatever a phase reads may be overwritten once it is over, so threads read it while they hold an item,
 * and at no other time. */
typedef struct {
    _Alignas(128) atomic_int claimed;
    atomic_int done;
} Phase;

/* Other threads' work is waited for busily as long as it may be short. */
#define SPINS 4000

INLINE void pause_a_little(int spins) {
    if (spins > SPINS) sched_yield();
#if defined(__SSE2__)
    else __builtin_ia32_pause();
#endif
}

#define EACH_ITEM(phase, i, items)                                                                                     \
    for (long i; (i = atomic_fetch_add_explicit(&(phase)->claimed, 1, memory_order_relaxed)) < (items);                \
         atomic_fetch_add_explicit(&(phase)->done, 1, memory_order_release))

/* The phase behind this one, once this one is over. */
INLINE Phase *over(Phase *phase, long items) {
    for (int spins = 0; atomic_load_explicit(&phase->done, memory_order_acquire) < items; spins++) pause_a_little(spins);
    return phase + 1;
}

/* Panels as items: several at a time, and single ones at the end, so that threads end together. */
typedef struct {
    int size, large, items;
} Split;

INLINE Split split_of(int outputs) {
    const int panels = (outputs + PANEL - 1) / PANEL, threads = omp_get_num_threads(), few = 12 * threads * WIDE;
    const int size = threads == 1 ? panels : (1 + panels / few) * WIDE;
    const int large = threads == 1 ? 1 : panels > 2 * threads ? (panels - 2 * threads) / size : 0;
    return (Split){size, large, large + panels - large * size};
}
INLINE int first_panel(Split s, int i) { return i <= s.large ? i * s.size : s.large * s.size + i - s.large; }

INLINE int chunks_of(long rows) { return (rows + ROWS - 1) / ROWS; }

/* What a thread made of the inputs of a chunk of rows, for all matrices that take it alike. */
typedef struct {
    Operands o;
    int kind, chunk; /* kind -1: nothing */
} Made;
enum { AS_THEY_ARE, SCALED, ROUNDED };

static void make(Made *made, const Matrix *w, const float *x, size_t ldx, long rows, int chunk) {
    const int kind = is_quantized(w->format) && w->int8_inputs ? ROUNDED : has_nibbles(w->format) ? SCALED : AS_THEY_ARE;
    if (made->kind == kind && made->chunk == chunk) return;
    const long begin = (long)chunk * ROWS, now = rows - begin < ROWS ? rows - begin : ROWS;
    const size_t blocks = w->inputs / BLOCK;
    *made = (Made){{.x = x + begin * ldx, .ldx = ldx, .rows = now}, kind, chunk};
    if (kind == AS_THEY_ARE) return;
    const size_t of_row = w->inputs * (kind == ROUNDED ? 1 : sizeof(float)) + blocks * 3 * sizeof(float);
    float *totals = scratch(0, ROWS * of_row), *scales = totals + ROWS * blocks, *sums = scales + ROWS * blocks;
    float *inputs = sums + ROWS * blocks;
    made->o.totals = totals;
    made->o.ldx = w->inputs;
    if (kind == ROUNDED) {
        made->o.scales = scales, made->o.sums = (int32_t *)sums, made->o.integers = (int8_t *)inputs;
        for (long r = 0; r < now; r++)
            rounded(x + (begin + r) * ldx, w->inputs, now, (int8_t *)inputs + r * BLOCK, scales + r, totals + r,
                    (int32_t *)sums + r);
        return;
    }
    made->o.x = inputs;
    for (long r = 0; r < now; r++) {
        const float *from = x + (begin + r) * ldx;
        for (size_t b = 0; b < blocks; b++) {
            vec sum = {0};
            for (int i = 0; i < BLOCK; i += LANES) sum += load(from + b * BLOCK + i);
            totals[b * now + r] = total(sum);
        }
        scaled(from, w->inputs, inputs + r * w->inputs);
    }
}

/* Item i of y = x W^T + bias + residual. */
static void item(const Matrix *w, Split split, int i, Made *made, const float *x, size_t ldx, long rows, Result to) {
    const int chunk = i / split.items, part = i % split.items;
    const long begin = (long)chunk * ROWS, now = rows - begin < ROWS ? rows - begin : ROWS;
    make(made, w, x, ldx, rows, chunk);
    Operands o = made->o;
    o.stride = (size_t)(w->inputs / BLOCK) * block_bytes(w->format);
    const Result here = {to.y + begin * to.ldy, to.residual ? to.residual + begin * to.ldy : 0, to.ldy};
    share(w, &o, now, here, first_panel(split, part), first_panel(split, part + 1));
}

/* This thread's part of y = x W^T + bias + residual, which is the phase. */
static Phase *product(Phase *phase, const Matrix *w, const float *x, long rows, Result to) {
    const Split split = split_of(w->outputs);
    const int items = chunks_of(rows) * split.items;
    Made made = {.kind = -1};
    EACH_ITEM(phase, i, items) item(w, split, i, &made, x, w->inputs, rows, to);
    return over(phase, items);
}

/* y = x W^T + bias, [rows, outputs]. */
void paceline_product(const Matrix *w, const float *x, long rows, float *y, int threads) {
    Phase phase = {0};
#pragma omp parallel num_threads(threads)
    product(&phase, w, x, rows, (Result){y, 0, w->outputs});
}

/* Row `index` of the matrix itself, [inputs] in float32. */
static void row_of(const Matrix *w, int64_t index, float *to) {
    const int bytes = block_bytes(w->format), header = header_bytes(w->format), blocks = w->inputs / BLOCK, lane = index % PANEL;
    const uint8_t *at = w->data + index / PANEL * blocks * bytes;
    for (int b = 0; b < blocks; b++, at += bytes) {
        const uint8_t *word = at + header + 4 * lane, *half = at + 2 * lane / (2 * LANES) * (2 * LANES);
        const float scale = header ? halves(half)[lane % LANES] : 0;
        const float least = w->format == Q4_1 ? halves(half + 2 * PANEL)[lane % LANES] : w->format == Q4_0 ? -8 * scale : 0;
        for (int k = 0; k < BLOCK; k++, to++) {
            union { uint32_t bits; float number; } value;
            switch (w->format) {
            case FLOAT32: memcpy(to, word + 64 * k, 4); break;
            case BFLOAT16:
                memcpy(&value.bits, word + 64 * (k / 2), 4);
                value.bits = k % 2 ? value.bits & 0xffff0000u : value.bits << 16;
                *to = value.number;
                break;
            case FLOAT16: *to = halves(half + 32 * k)[lane % LANES]; break;
            case Q8_0: *to = scale * (int8_t)word[64 * (k / 4) + k % 4]; break;
            default: *to = scale * (word[64 * (k / 8) + k % 4] >> (k % 8 < 4 ? 0 : 4) & 15) + least;
            }
        }
    }
}

/* Rows `indices` of the matrix itself, [count, inputs]. */
void paceline_rows(const Matrix *w, const int64_t *indices, long count, float *to) {
    for (long i = 0; i < count; i++) row_of(w, indices[i], to + i * w->inputs);
}

/* ---- the pieces of a layer between its products ---- */

/* RMS norm of one row; `size` is a multiple of LANES. */
static void norm(const float *x, const float *weight, float eps, int size, float *y) {
    vec squares = {0};
    for (int i = 0; i < size; i += LANES) squares += load(x + i) * load(x + i);
    float scale = 1.0f / sqrtf(total(squares) / size + eps);
    for (int i = 0; i < size; i += LANES) store(y + i, load(x + i) * scale * load(weight + i));
}

/* Rows that are normed together, where every row is normed once. */
#define NORMED 8

/* A few rows are quicker normed by every thread for itself than waited for; more of them here, to `shared`. */
static Phase *norm_many(Phase *phase, const float *x, const float *weight, float eps, int size, long rows, float *shared) {
    if (rows <= SMALL) return phase;
    const long items = (rows + NORMED - 1) / NORMED;
    EACH_ITEM(phase, i, items)
        for (long r = i * NORMED; r < rows && r < (i + 1) * NORMED; r++) norm(x + r * size, weight, eps, size, shared + r * size);
    return over(phase, items);
}

/* norm(x) for whoever multiplies with it next: a thread's own where there are few rows. */
static const float *normed(const float *x, const float *weight, float eps, int size, long rows, const float *shared) {
    if (rows > SMALL) return shared;
    float *own = scratch(2, rows * size * sizeof(float));
    for (long r = 0; r < rows; r++) norm(x + r * size, weight, eps, size, own + r * size);
    return own;
}

/* x += norm(y). */
static Phase *add_normed(Phase *phase, const float *y, const float *weight, float eps, int size, long rows, float *x) {
    const long items = (rows + NORMED - 1) / NORMED;
    EACH_ITEM(phase, i, items)
        for (long r = i * NORMED; r < rows && r < (i + 1) * NORMED; r++) {
            float *own = scratch(2, size * sizeof(float));
            norm(y + r * size, weight, eps, size, own);
            for (int c = 0; c < size; c++) x[r * size + c] += own[c];
        }
    return over(phase, items);
}

INLINE vec tanh_of(vec x) { return 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f); }

enum { SILU, GELU_TANH, GELU };

INLINE vec activated(int activation, vec x) {
    if (activation == SILU) return x / (1.0f + exponential(-x));
    if (activation == GELU_TANH) return 0.5f * x * (1.0f + tanh_of(0.7978845608f * (x + 0.044715f * x * x * x)));
    vec y;
    for (int i = 0; i < LANES; i++) y[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0.7071067812f));
    return y;
}

/* ---- the two halves of a layer, as one thread of several runs them ---- */

typedef struct {
    Matrix gate, up, down;
    const float *norm, *post_norm; /* the second may be null */
    float eps;
    int32_t activation;
} MLP;

/* x += post_norm(down(activation(gate(n)) * up(n))), n = norm(x). `scratch` holds rows * (2 hidden + 2 wide) numbers, wide
 * being the outputs of gate and up. */
static Phase *mlp(Phase *phase, const MLP *m, float *x, long rows, float *scratch) {
    const int hidden = m->gate.inputs, wide = m->down.inputs;
    float *after = scratch + rows * hidden, *gate = after + rows * hidden, *up = gate + rows * wide;
    phase = norm_many(phase, x, m->norm, m->eps, hidden, rows, scratch);
    const Split split = split_of(wide);
    const int items = chunks_of(rows) * split.items;
    const float *n = 0;
    Made made = {.kind = -1};
    EACH_ITEM(phase, i, items) {
        if (!n) n = normed(x, m->norm, m->eps, hidden, rows, scratch);
        item(&m->gate, split, i, &made, n, hidden, rows, (Result){gate, 0, wide});
        item(&m->up, split, i, &made, n, hidden, rows, (Result){up, 0, wide});
        const long begin = i / split.items * ROWS, end = rows < begin + ROWS ? rows : begin + ROWS;
        const int low = first_panel(split, i % split.items) * PANEL, high = first_panel(split, i % split.items + 1) * PANEL;
        for (long r = begin; r < end; r++)
            for (int c = low; c < high; c += LANES) {
                float *at = gate + r * wide + c;
                const vec in = load(at);
                const vec out = m->activation == SILU ? activated(SILU, in)
                    : m->activation == GELU_TANH ? activated(GELU_TANH, in) : activated(GELU, in);
                store(at, out * load(up + r * wide + c));
            }
    }
    phase = over(phase, items);
    if (!m->post_norm) return product(phase, &m->down, gate, rows, (Result){x, x, hidden});
    phase = product(phase, &m->down, gate, rows, (Result){after, 0, hidden});
    return add_normed(phase, after, m->post_norm, m->eps, hidden, rows, x);
}

typedef struct {
    Matrix q, k, v, output;
    const float *norm, *post_norm, *q_norm, *k_norm; /* all may be null; the first where the inputs are given */
    float eps, scale, softcap;                       /* softcap 0: none */
    int32_t head_dim;
} Attention;

/* Consecutive tokens of one sequence. */
typedef struct {
    int32_t tokens, slot, start, window; /* position of the first token; window 0: each token sees all before it */
} Chunk;

/* One layer's keys and values, [slots, kv heads, capacity, head_dim] each, in float32 or float16. */
typedef struct {
    void *keys, *values;
    int64_t capacity;
    int32_t half;
} Cache;

/* Positions that one token meets at once. Their borders are absolute, so that they are the same for every pass. */
#define SPAN 32
/* Tokens that meet a span while it is in the first cache. */
#define TOGETHER 16

static void to_half(const float *x, int size, uint16_t *y) {
#if defined(__AVX512F__)
    for (int i = 0; i < size; i += 16)
        _mm256_storeu_si256((__m256i *)(y + i), _mm512_cvtps_ph(_mm512_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    for (int i = 0; i < size; i += 8)
        _mm_storeu_si128((__m128i *)(y + i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__ARM_NEON)
    for (int i = 0; i < size; i += 4) vst1_u16(y + i, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(x + i))));
#else
    (void)x, (void)size, (void)y; /* never asked for: see paceline_has_halves */
#endif
}

/* q or k of one token and head, normed and rotated in place. */
INLINE void placed(const Attention *a, float *x, const float *weight, const float *cos, const float *sin) {
    const int size = a->head_dim, half = size / 2;
    if (weight) norm(x, weight, a->eps, size, x);
    if (!cos) return;
    for (int i = 0; i < half; i++) {
        float low = x[i], high = x[i + half];
        x[i] = low * cos[i] + high * sin[i];
        x[i + half] = high * cos[i + half] + low * sin[i + half];
    }
}

static void store_position(const Cache *cache, void *to, long at, const float *x, int size) {
    if (cache->half) to_half(x, size, (uint16_t *)to + at);
    else memcpy((float *)to + at, x, size * sizeof(float));
}

/* `count` positions from `at` on, as float32: in place, or converted to `to`. */
static const float *positions(const Cache *cache, const void *from, long at, long count, float *to) {
    if (!cache->half) return (const float *)from + at;
    for (long i = 0; i < count; i += LANES) store(to + i, halves((const uint8_t *)((const uint16_t *)from + at + i)));
    return to;
}

/* A token's softmax so far: the largest score, and the sum of exp(score - largest). Its weighted values are in out. */
typedef struct {
    float largest, sum;
} Softmax;

#if LANES == 4
static const ivec lane_numbers = {0, 1, 2, 3};
#elif LANES == 8
static const ivec lane_numbers = {0, 1, 2, 3, 4, 5, 6, 7};
#else
static const ivec lane_numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#endif

/* One token and query head over positions low..high - 1 of the span whose keys and values begin at `begin`. */
static void meet(const Attention *a, const float *q, const float *keys, const float *values, int begin, int low, int high,
                 Softmax *state, float *out) {
    const int size = a->head_dim;
    float weights[SPAN];
    vec best = all(state->largest);
    for (int i = 0; i < SPAN; i += LANES) {
        vec scores = all(-INFINITY);
        if (begin + i < high && begin + i + LANES > low) {
            /* Lanes beyond the last position repeat it: there is nothing to read behind it. */
            const float *key[LANES];
            UNROLL for (int l = 0; l < LANES; l++) {
                int at = i + l < high - begin ? i + l : high - begin - 1;
                key[l] = keys + (long)at * size;
            }
            vec sums[LANES];
            UNROLL for (int l = 0; l < LANES; l++) sums[l] = all(0);
            for (int d = 0; d < size; d += LANES) {
                vec query = load(q + d);
                UNROLL for (int l = 0; l < LANES; l++) sums[l] += query * load(key[l] + d);
            }
            scores = totals_of(sums);
            scores = a->softcap ? a->softcap * tanh_of(scores * (a->scale / a->softcap)) : scores * a->scale;
            ivec position = lane_numbers + (begin + i);
            scores = choose((position >= low) & (position < high), scores, all(-INFINITY));
            best = choose(scores > best, scores, best);
        }
        store(weights + i, scores);
    }
    float largest = best[0];
    UNROLL for (int l = 1; l < LANES; l++) largest = best[l] > largest ? best[l] : largest;
    vec sum = {0};
    for (int i = 0; i < SPAN; i += LANES) {
        vec weight = exponential(load(weights + i) - largest);
        store(weights + i, weight);
        sum += weight;
    }
    const float kept = exponential(all(state->largest - largest))[0];
    state->largest = largest;
    state->sum = state->sum * kept + total(sum);
#define VALUES(count)                                                                                                  \
    for (; d + (count) * LANES <= size; d += (count) * LANES) {                                                        \
        vec sums[count];                                                                                               \
        UNROLL for (int i = 0; i < count; i++) sums[i] = load(out + d + i * LANES) * kept;                             \
        for (int at = low - begin; at < high - begin; at++) {                                                          \
            vec weight = all(weights[at]);                                                                             \
            UNROLL for (int i = 0; i < count; i++) sums[i] += weight * load(values + (long)at * size + d + i * LANES);  \
        }                                                                                                              \
        UNROLL for (int i = 0; i < count; i++) store(out + d + i * LANES, sums[i]);                                    \
    }
    int d = 0;
    VALUES(8)
    VALUES(1)
}

/* Up to TOGETHER tokens of a chunk, one query head. */
static void attend(const Attention *a, const Cache *cache, long head_at, const float *q, float *out, long stride, int start,
                   int tokens, int window) {
    const int size = a->head_dim;
    Softmax states[TOGETHER];
    for (int t = 0; t < tokens; t++) {
        states[t] = (Softmax){-INFINITY, 0};
        clear(out + t * stride, size);
    }
    float *converted = cache->half ? scratch(1, 2 * SPAN * size * sizeof(float)) : 0;
    const int end = start + tokens, first = window && start + 1 > window ? start + 1 - window : 0;
    for (int begin = first / SPAN * SPAN; begin < end; begin += SPAN) {
        const int count = end - begin < SPAN ? end - begin : SPAN;
        const long at = head_at + (long)begin * size;
        const float *keys = positions(cache, cache->keys, at, (long)count * size, converted);
        const float *values = positions(cache, cache->values, at, (long)count * size, converted + SPAN * size);
        for (int t = 0; t < tokens; t++) {
            int position = start + t;
            int low = window && position + 1 > window ? position + 1 - window : 0, high = position + 1;
            if (low < begin) low = begin;
            if (high > begin + SPAN) high = begin + SPAN;
            if (low < high) meet(a, q + t * stride, keys, values, begin, low, high, states + t, out + t * stride);
        }
    }
    for (int t = 0; t < tokens; t++) {
        const vec share = all(1.0f / states[t].sum);
        for (int i = 0; i < size; i += LANES) store(out + t * stride + i, load(out + t * stride + i) * share);
    }
}

/* Where the rows of a pass belong: chunks one after the other, and each position's cos and sin, [positions, head_dim], the
 * first half of sin negated; null: no rotation. */
typedef struct {
    const Chunk *chunks;
    const float *cos, *sin;
    float *inputs; /* [rows, inputs of q]: what q, k and v multiply; null: norm(x) */
    int32_t count;
} Places;

/* Query heads of tokens that attend together: an item. */
INLINE int together_of(const Chunk *chunk) { return chunk->tokens > TOGETHER ? TOGETHER : 4; }

/* Rows are placed by one thread where they are few. */
INLINE long placed_together(long rows) { return rows <= SMALL ? SMALL : 16; }

/* q, k and v of one row in their places: normed, rotated, and keys and values in the cache. */
static void place_row(const Attention *a, const Cache *cache, const Places *places, const Chunk *chunk, int t, long row,
                      float *q, float *k, const float *v) {
    const int size = a->head_dim, heads = a->q.outputs / size, kv_heads = a->k.outputs / size;
    const long angles = (chunk->start + t) * (long)size;
    const float *cosines = places->cos ? places->cos + angles : 0, *sines = places->cos ? places->sin + angles : 0;
    for (int h = 0; h < heads; h++) placed(a, q + row * a->q.outputs + h * size, a->q_norm, cosines, sines);
    for (int h = 0; h < kv_heads; h++) {
        const long at = (((long)chunk->slot * kv_heads + h) * cache->capacity + chunk->start + t) * size;
        float *key = k + row * a->k.outputs + h * size;
        placed(a, key, a->k_norm, cosines, sines);
        store_position(cache, cache->keys, at, key, size);
        store_position(cache, cache->values, at, v + row * a->v.outputs + h * size, size);
    }
}

/* x += post_norm(output(attention)), every chunk over its own slot, whose keys and values are written first. `scratch`
 * holds rows * (2 hidden + 2 q + k + v) numbers. */
static Phase *attention(Phase *phase, const Attention *a, const Cache *cache, const Places *places, float *x, long rows,
                        float *scratch) {
    const int hidden = a->output.outputs, inputs = a->q.inputs, size = a->head_dim, heads = a->q.outputs / size, kv_heads = a->k.outputs / size;
    const int q_size = a->q.outputs, kv_size = a->k.outputs;
    float *after = scratch + rows * hidden, *q = after + rows * hidden, *mixed = q + rows * q_size;
    float *k = mixed + rows * q_size, *v = k + rows * kv_size;

    /* 1. q, k and v, one after the other. */
    if (!places->inputs) phase = norm_many(phase, x, a->norm, a->eps, hidden, rows, scratch);
    const Matrix *matrices[] = {&a->q, &a->k, &a->v};
    const Result results[] = {{q, 0, q_size}, {k, 0, kv_size}, {v, 0, kv_size}};
    const Split splits[] = {split_of(q_size), split_of(kv_size), split_of(kv_size)};
    const int of_chunk = splits[0].items + splits[1].items + splits[2].items;
    long items = (long)chunks_of(rows) * of_chunk;
    const float *n = places->inputs;
    Made made = {.kind = -1};
    EACH_ITEM(phase, i, items) {
        if (!n) n = normed(x, a->norm, a->eps, hidden, rows, scratch);
        int which = 0, part = i % of_chunk;
        while (part >= splits[which].items) part -= splits[which++].items;
        const int at = i / of_chunk * splits[which].items + part;
        item(matrices[which], splits[which], at, &made, n, inputs, rows, results[which]);
    }
    phase = over(phase, items);

    /* 2. In their places. */
    const Chunk *end = places->chunks + places->count;
    const long placed_rows = placed_together(rows);
    items = (rows + placed_rows - 1) / placed_rows;
    EACH_ITEM(phase, i, items) {
        long row = 0;
        for (const Chunk *chunk = places->chunks; chunk < end; row += chunk++->tokens)
            for (int t = 0; t < chunk->tokens; t++)
                if ((row + t) / placed_rows == i) place_row(a, cache, places, chunk, t, row + t, q, k, v);
    }
    phase = over(phase, items);

    /* 3. Attention. */
    items = 0;
    for (const Chunk *chunk = places->chunks; chunk < end; chunk++)
        items += (chunk->tokens + together_of(chunk) - 1) / together_of(chunk) * heads;
    EACH_ITEM(phase, i, items) {
        const Chunk *chunk = places->chunks;
        long row = 0, unit = i;
        for (;; row += chunk++->tokens) {
            const long units = (chunk->tokens + together_of(chunk) - 1) / together_of(chunk) * heads;
            if (unit < units) break;
            unit -= units;
        }
        const int together = together_of(chunk), h = unit % heads, t = unit / heads * together;
        const int tokens = chunk->tokens - t < together ? chunk->tokens - t : together;
        const long head_at = ((long)chunk->slot * kv_heads + h / (heads / kv_heads)) * cache->capacity * size;
        const long at = (row + t) * q_size + h * size;
        attend(a, cache, head_at, q + at, mixed + at, q_size, chunk->start + t, tokens, chunk->window);
    }
    phase = over(phase, items);

    /* 4. Back into x. */
    if (!a->post_norm) return product(phase, &a->output, mixed, rows, (Result){x, x, hidden});
    phase = product(phase, &a->output, mixed, rows, (Result){after, 0, hidden});
    return add_normed(phase, after, a->post_norm, a->eps, hidden, rows, x);
}

typedef struct {
    Attention attention;
    MLP mlp;
    int32_t kind; /* which of the pass's places hold for it: layers differ in window and rotation */
} Layer;

/* What does not differ from pass to pass. */
typedef struct {
    Matrix embedding, head, mix; /* the last only of a draft that is given states of a target: several made one */
    const Layer *layers;
    const float *last_norm;                     /* null: there is none */
    const float *embedding_norm, *given_norm;   /* of such a draft */
    int64_t count;                              /* of layers */
    int64_t scratch;                            /* numbers that a row needs between the products of a layer */
    float embedding_scale, eps;
} Model;

typedef struct {
    Places *kinds;
    const Cache *caches;     /* of each layer */
    const int64_t *tokens;   /* [rows]; null: x is what is given */
    const float *given;      /* to a draft, [rows, hidden], or, for `mix`, [rows, inputs of mix]; null to others */
    const int32_t *captured; /* [captures], of 0 to the number of layers: behind how many of them a state is kept; behind all
                                it is that behind the last norm */
    const int64_t *wanted;   /* [outputs], rows of which the head says something */
    float *x;                /* [rows, hidden], as the last layer gives it */
    float *kept;             /* [rows, captures, hidden] */
    float *logits;           /* [outputs, outputs of the head] */
    int64_t rows, captures, outputs;
    int32_t mixes;
} Pass;

static void embed(const Model *m, int64_t token, float *to) {
    row_of(&m->embedding, token, to);
    for (int i = 0; i < m->embedding.inputs && m->embedding_scale != 1; i++) to[i] *= m->embedding_scale;
}

/* What the first layer takes: rows of the embedding, or what is given; then its q, k and v multiply the token and what is
 * given, each normed, unless they are given theirs too. */
static Phase *read_tokens(Phase *phase, const Model *m, const Pass *p) {
    const int hidden = m->embedding.inputs;
    if (p->mixes) phase = product(phase, &m->mix, p->given, p->rows, (Result){p->x, 0, hidden});
    EACH_ITEM(phase, r, p->rows) {
        float *x = p->x + r * hidden;
        if (p->given && !p->mixes) memcpy(x, p->given + r * hidden, hidden * sizeof(float));
        if (!p->tokens) continue;
        float *both = p->given ? p->kinds->inputs + 2 * r * hidden : 0;
        embed(m, p->tokens[r], both ? both : x);
        if (both) norm(both, m->embedding_norm, m->eps, hidden, both), norm(x, m->given_norm, m->eps, hidden, both + hidden);
    }
    return over(phase, p->rows);
}

static int captures_behind(const Pass *p, int layers) {
    int found = 0;
    for (int j = 0; j < p->captures; j++) found |= p->captured[j] == layers;
    return found;
}

static void last_normed(const Model *m, const float *x, float *to) {
    const int hidden = m->head.inputs;
    if (m->last_norm) norm(x, m->last_norm, m->eps, hidden, to);
    else memcpy(to, x, hidden * sizeof(float));
}

/* States behind so many layers, before the next one writes over them. */
static Phase *capture(Phase *phase, const Model *m, const Pass *p, int layers) {
    if (!captures_behind(p, layers)) return phase;
    const int hidden = m->head.inputs;
    EACH_ITEM(phase, r, p->rows)
        for (int j = 0; j < p->captures; j++) {
            if (p->captured[j] != layers) continue;
            const float *x = p->x + r * hidden;
            float *to = p->kept + (r * p->captures + j) * hidden;
            if (layers == m->count) last_normed(m, x, to);
            else memcpy(to, x, hidden * sizeof(float));
        }
    return over(phase, p->rows);
}

/* At most, of a layer; and around them. */
#define PHASES 11
#define PHASES_AROUND 5

/* From tokens, or from what the first layer takes, to the logits of the rows that are wanted. Returns the bytes that it could
 * not get to work with; 0 if all is done. */
long paceline_run(const Model *m, const Pass *p, int threads) {
    const int hidden = m->head.inputs;
    const size_t bytes = (PHASES * m->count + PHASES_AROUND) * sizeof(Phase);
    const size_t both = p->tokens && p->given ? p->rows * 2 * hidden : 0;
    const size_t numbers = p->rows * m->scratch + p->outputs * hidden + both;
    Phase *phases = aligned_alloc(_Alignof(Phase), bytes + (numbers * sizeof(float) / sizeof(Phase) + 1) * sizeof(Phase));
    if (!phases) return bytes + numbers * sizeof(float);
    memset(phases, 0, bytes);
    float *last = (float *)((uint8_t *)phases + bytes), *scratch = last + p->outputs * hidden; /* `last`: for the head */
    if (both) p->kinds->inputs = scratch + p->rows * m->scratch;
#pragma omp parallel num_threads(threads)
    {
        Phase *phase = phases;
        phase = read_tokens(phase, m, p);
        for (int64_t i = 0; i < m->count; i++) {
            const Layer *layer = m->layers + i;
            phase = capture(phase, m, p, i);
            phase = attention(phase, &layer->attention, p->caches + i, p->kinds + layer->kind, p->x, p->rows, scratch);
            phase = mlp(phase, &layer->mlp, p->x, p->rows, scratch);
        }
        phase = capture(phase, m, p, m->count);
        EACH_ITEM(phase, i, p->outputs) last_normed(m, p->x + p->wanted[i] * hidden, last + i * hidden);
        phase = over(phase, p->outputs);
        product(phase, &m->head, last, p->outputs, (Result){p->logits, 0, m->head.outputs});
    }
    free(phases);
    return 0;
}

/* The norm of each row of x, [rows, size], for what stands outside of the layers. */
void paceline_norm(const float *x, const float *weight, float eps, long size, long rows, float *y) {
    for (long r = 0; r < rows; r++) norm(x + r * size, weight, eps, size, y + r * size);
}

/* What the library was compiled for: heads have to be multiples of this, and float16 caches need hardware for it. */
int paceline_lanes(void) { return LANES; }
int paceline_has_halves(void) {
#if defined(__F16C__) || defined(__AVX512F__) || defined(__ARM_NEON)
    return 1;
#else
    return 0;
#endif
}
