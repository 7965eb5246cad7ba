// Layers of training that change no shape, in bf16, each in one pass over memory, forward and backward.

#include <omp.h>

#include "bf16.h"

// from [rows, size] -> to [rows, size], and the scale of each row for the backward pass.
void norm(const bf16 *from, long rows, long size, float epsilon, const bf16 *weight, bf16 *to, float *scales)
{
#pragma omp parallel for schedule(static)
    for (long row = 0; row < rows; row++) {
        scales[row] = inverse_root_mean_square(from + row * size, size, epsilon);
        for (long column = row * size; column < (row + 1) * size; column += LANES)
            store(to + column, normed(from + column, scales[row], weight + column - row * size));
    }
}

// Gradients: of_to [rows, size] -> of_from [rows, size] and of_weight [threads, size], which starts at 0 and whose sum
// is the gradient of the weight.
void norm_backward(const bf16 *of_to, const bf16 *from, const float *scales, long rows, long size, const bf16 *weight,
                   bf16 *of_from, float *of_weight)
{
#pragma omp parallel
    {
        float *sums = of_weight + omp_get_thread_num() * size;
#pragma omp for schedule(static)
        for (long row = 0; row < rows; row++) {
            const bf16 *x = from + row * size, *given = of_to + row * size;
            const __m512 scale = _mm512_set1_ps(scales[row]);
            __m512 along = _mm512_setzero_ps(); // of the gradient, in the direction of x
            for (long column = 0; column < size; column += LANES) {
                const __m512 gradient = widened(given + column), numbers = widened(x + column);
                along = _mm512_fmadd_ps(_mm512_mul_ps(gradient, widened(weight + column)), numbers, along);
                const __m512 sum = _mm512_loadu_ps(sums + column);
                _mm512_storeu_ps(sums + column, _mm512_fmadd_ps(gradient, _mm512_mul_ps(numbers, scale), sum));
            }
            const float cube = scales[row] * scales[row] * scales[row];
            const __m512 less = _mm512_set1_ps(_mm512_reduce_add_ps(along) * cube / size);
            for (long column = 0; column < size; column += LANES) {
                const __m512 plain = _mm512_mul_ps(widened(given + column), widened(weight + column));
                const __m512 sum = _mm512_fmsub_ps(plain, scale, _mm512_mul_ps(widened(x + column), less));
                store(of_from + row * size + column, sum);
            }
        }
    }
}

// silu(gate) * up, of `count` numbers.
void gate(const bf16 *gate, const bf16 *up, long count, bf16 *to)
{
#pragma omp parallel for schedule(static)
    for (long at = 0; at < count; at += LANES) {
        const __m512 numbers = widened(gate + at);
        store(to + at, _mm512_mul_ps(rounded(_mm512_mul_ps(numbers, sigmoid(numbers))), widened(up + at)));
    }
}

void gate_backward(const bf16 *of_to, const bf16 *gate, const bf16 *up, long count, bf16 *of_gate, bf16 *of_up)
{
    const __m512 one = _mm512_set1_ps(1.0f);
#pragma omp parallel for schedule(static)
    for (long at = 0; at < count; at += LANES) {
        const __m512 given = widened(of_to + at), numbers = widened(gate + at), share = sigmoid(numbers);
        const __m512 slope = _mm512_mul_ps(share, _mm512_fmadd_ps(numbers, _mm512_sub_ps(one, share), one));
        store(of_up + at, _mm512_mul_ps(given, _mm512_mul_ps(numbers, share)));
        store(of_gate + at, _mm512_mul_ps(_mm512_mul_ps(given, widened(up + at)), slope));
    }
}
