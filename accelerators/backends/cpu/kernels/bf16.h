// Numbers in bf16: read as sixteen float32 numbers, computed with, and rounded. Needs AVX512-BF16.

#include <immintrin.h>
#include <stdint.h>

typedef uint16_t bf16;

enum { LANES = 16 }; // float32 numbers of a register

static inline __m512 widened(const bf16 *from)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)from)), 16));
}

static inline __m256i narrowed(__m512 numbers) { return (__m256i)_mm512_cvtneps_pbh(numbers); }

static inline void store(bf16 *to, __m512 numbers) { _mm256_storeu_si256((void *)to, narrowed(numbers)); }

static inline __m512 rounded(__m512 numbers) // to bf16 and back
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrowed(numbers)), 16));
}

static inline __m512 exponential(__m512 x) // relative error below 2e-7
{
    x = _mm512_max_ps(_mm512_set1_ps(-126.0f), x); // returns x if x is NaN
    x = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f));
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 rest = _mm512_sub_ps(x, whole);
    __m512 sum = _mm512_set1_ps(1.5403530e-4f); // Taylor's series of 2^rest, |rest| <= 1/2
    const float series[] = {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f};
    for (int term = 0; term < 6; term++) sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(series[term]));
    return _mm512_scalef_ps(sum, whole);
}

static inline __m512 sigmoid(__m512 x)
{
    const __m512 one = _mm512_set1_ps(1.0f);
    return _mm512_div_ps(one, _mm512_add_ps(one, exponential(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

// 1 / sqrt(mean of squares + epsilon), of `size` numbers: a multiple of LANES.
static inline float inverse_root_mean_square(const bf16 *from, long size, float epsilon)
{
    __m512 squares = _mm512_setzero_ps();
    for (long column = 0; column < size; column += LANES) {
        const __m512 numbers = widened(from + column);
        squares = _mm512_fmadd_ps(numbers, numbers, squares);
    }
    return 1.0f / __builtin_sqrtf(_mm512_reduce_add_ps(squares) / size + epsilon);
}

// RMSNorm (Zhang and Sennrich 2019) of numbers with that scale, rounded as transformers does; the result is not.
static inline __m512 normed(const bf16 *from, float scale, const bf16 *weight)
{
    return _mm512_mul_ps(rounded(_mm512_mul_ps(widened(from), _mm512_set1_ps(scale))), widened(weight));
}
