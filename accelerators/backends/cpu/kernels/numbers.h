// Numbers in memory, bf16 if BF16 is defined and else float32, and registers of LANES float32 numbers to compute with.
//
// Registers are vectors of gcc and clang, so the code is the same for every processor. Instructions are named only if a
// compiler does not find them.

#pragma once

#include <stdint.h>

#if defined __AVX512F__
#include <immintrin.h>
#define LANES 16
#define HALVING(STEP) STEP(8) STEP(4) STEP(2) STEP(1)
#define EACH(LANE, ...)                                                                                                \
    LANE(0, __VA_ARGS__), LANE(1, __VA_ARGS__), LANE(2, __VA_ARGS__), LANE(3, __VA_ARGS__), LANE(4, __VA_ARGS__),      \
        LANE(5, __VA_ARGS__), LANE(6, __VA_ARGS__), LANE(7, __VA_ARGS__), LANE(8, __VA_ARGS__), LANE(9, __VA_ARGS__),  \
        LANE(10, __VA_ARGS__), LANE(11, __VA_ARGS__), LANE(12, __VA_ARGS__), LANE(13, __VA_ARGS__),                    \
        LANE(14, __VA_ARGS__), LANE(15, __VA_ARGS__)
#elif defined __AVX__
#define LANES 8
#define HALVING(STEP) STEP(4) STEP(2) STEP(1)
#define EACH(LANE, ...)                                                                                                \
    LANE(0, __VA_ARGS__), LANE(1, __VA_ARGS__), LANE(2, __VA_ARGS__), LANE(3, __VA_ARGS__), LANE(4, __VA_ARGS__),      \
        LANE(5, __VA_ARGS__), LANE(6, __VA_ARGS__), LANE(7, __VA_ARGS__)
#else // NEON, SSE
#define LANES 4
#define HALVING(STEP) STEP(2) STEP(1)
#define EACH(LANE, ...) LANE(0, __VA_ARGS__), LANE(1, __VA_ARGS__), LANE(2, __VA_ARGS__), LANE(3, __VA_ARGS__)
#endif
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
#include <arm_neon.h>
#endif

typedef float vector __attribute__((vector_size(4 * LANES)));
typedef int32_t integers __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES))); // a word: one number of float32 or two of bf16

#ifdef BF16
typedef uint16_t number;
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
enum { PER_WORD = 2 };
#else
typedef float number;
enum { PER_WORD = 1 };
#endif

enum { WORDS = LANES * PER_WORD }; // numbers in a register of words

static inline vector all(float number) { return (vector){0} + number; }

static inline vector choose(integers which, vector yes, vector no)
{
    return (vector)(((integers)yes & which) | ((integers)no & ~which));
}

static inline vector larger(vector a, vector b) { return choose(b > a, b, a); } // a if one is NaN

static inline words words_at(const void *from)
{
    words read;
    __builtin_memcpy(&read, from, sizeof read);
    return read;
}

static inline vector floats_at(const float *from) { return (vector)words_at(from); }

static inline void put(float *to, vector numbers) { __builtin_memcpy(to, &numbers, sizeof numbers); }

#ifdef BF16

static inline vector load(const number *from)
{
    halves read;
    __builtin_memcpy(&read, from, sizeof read);
    return (vector)(__builtin_convertvector(read, words) << 16);
}

static inline halves narrowed(vector numbers) // rounded to the nearest, or to even
{
#ifdef __AVX512BF16__
    return (halves)_mm512_cvtneps_pbh((__m512)numbers);
#else
    const words bits = (words)numbers, nan = (words)(numbers != numbers);
    return __builtin_convertvector(((bits + 0x7fff + (bits >> 16 & 1)) >> 16 & ~nan) | (nan & 0x7fc0), halves);
#endif
}

static inline void store(number *to, vector numbers)
{
    const halves rounded = narrowed(numbers);
    __builtin_memcpy(to, &rounded, sizeof rounded);
}

static inline vector rounded(vector numbers) // to bf16 and back
{
    return (vector)(__builtin_convertvector(narrowed(numbers), words) << 16);
}

static inline float value(number of)
{
    const uint32_t bits = (uint32_t)of << 16;
    float result;
    __builtin_memcpy(&result, &bits, sizeof result);
    return result;
}

static inline number nearest(float to) { return narrowed(all(to))[0]; }

#else

static inline vector load(const number *from) { return floats_at(from); }

static inline void store(number *to, vector numbers) { put(to, numbers); }

static inline vector rounded(vector numbers) { return numbers; }

static inline float value(number of) { return of; }

static inline number nearest(float to) { return to; }

#endif

// sum + the products of the numbers in each word.
static inline vector dot(vector sum, words a, words b)
{
#if !defined BF16
    return sum + (vector)a * (vector)b;
#elif defined __AVX512BF16__
    return (vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#elif defined __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
    return (vector)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
#else
    sum = sum + (vector)(a << 16) * (vector)(b << 16);
    return sum + (vector)(a & 0xffff0000) * (vector)(b & 0xffff0000);
#endif
}

// Lanes of two registers, by compile-time constants: lane l of the first is l, of the second LANES + l.
#ifdef __clang__
#define LANES_OF(A, B, ...) __builtin_shufflevector(A, B, __VA_ARGS__)
#else
#define LANES_OF(A, B, ...) __builtin_shuffle(A, B, (words){__VA_ARGS__})
#endif
#define AWAY(LANE, WIDTH) ((LANE) ^ (WIDTH)) // the lane WIDTH away

static inline float sum_of(vector numbers)
{
#define ADD(WIDTH) numbers += LANES_OF(numbers, numbers, EACH(AWAY, WIDTH));
    HALVING(ADD)
    return numbers[0];
}

static inline float largest_of(vector numbers)
{
#define TAKE(WIDTH) numbers = larger(numbers, LANES_OF(numbers, numbers, EACH(AWAY, WIDTH)));
    HALVING(TAKE)
    return numbers[0];
}

static inline vector exponential(vector x) // relative error below 3e-7 from -1 to 0, 4e-6 elsewhere; 0 below -87
{
    const vector lowest = all(-87.0f), highest = all(88.0f);
    const vector power = choose(x > highest, highest, larger(x, lowest)) * 1.44269504f; // NaN stays NaN
    const vector whole = (power + 12582912.0f) - 12582912.0f;                          // the nearest integer
    const vector rest = power - whole;
    vector sum = all(1.5403530e-4f); // Taylor's series of 2^rest, |rest| <= 1/2
    const float series[] = {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f};
    for (int term = 0; term < 6; term++) sum = sum * rest + series[term];
    const vector scaled = (vector)((integers)sum + (__builtin_convertvector(whole, integers) << 23));
    return choose(x < lowest, all(0), choose(x == x, scaled, x));
}

static inline vector sigmoid(vector x) { return 1.0f / (1.0f + exponential(-x)); }

// 1 / sqrt(mean of squares + epsilon), of `size` numbers: a multiple of LANES.
static inline float inverse_root_mean_square(const number *from, long size, float epsilon)
{
    vector squares = all(0);
    for (long column = 0; column < size; column += LANES) {
        const vector numbers = load(from + column);
        squares = numbers * numbers + squares;
    }
    return 1.0f / __builtin_sqrtf(sum_of(squares) / size + epsilon);
}

static inline integers below(long count) // the lanes before `count`
{
    integers lane;
    for (int index = 0; index < LANES; index++) lane[index] = index;
    return lane < (int32_t)count;
}

// LANES numbers, or `count` of them and zeros.
static inline vector load_some(const number *from, long count)
{
    if (count >= LANES) return load(from);
    number read[LANES] = {0};
    __builtin_memcpy(read, from, count * sizeof(number));
    return load(read);
}

static inline void store_some(number *to, vector numbers, long count) // the first `count` of LANES numbers
{
    if (count >= LANES) return store(to, numbers);
    number written[LANES];
    store(written, numbers);
    __builtin_memcpy(to, written, count * sizeof(number));
}
