// One more token for each row: the decoder layers of models like Llama, in bf16, on processors with AVX512-BF16.
//
// A step reads every weight once. Weights are therefore stored in the order in which they are read (`pack`), and all
// layers are one call: code in between would run with caches full of weights. Arrays are bf16 in row-major order; sums
// are float32. `decode.py` is the caller and checks the sizes.

#include <omp.h>

#include "panels.h"

enum { TOGETHER = 4 }; // heads at a time that share their keys

typedef struct {
    long hidden, heads, groups, size, inner; // sizes: `groups` key-value heads, `size` numbers in each head
    float epsilon, scale;
    const bf16 *norm, *qkv, *qkv_bias, *query_norm, *key_norm, *out, *out_bias, *mlp_norm, *gate, *up, *down;
} Layer; // biases and the norms of queries and keys may be NULL

// products

static inline long smaller(long a, long b) { return a < b ? a : b; }

// Transpose 16 x 16 pairs of numbers: blocks off the diagonal are exchanged, small ones first.
static inline void transpose(__m512i *rows)
{
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
#pragma GCC unroll 4
    for (int step = 1; step < 16; step *= 2) {
        const __m512i width = _mm512_set1_epi32(step), of_second = _mm512_add_epi32(lane, _mm512_set1_epi32(16));
        const __mmask16 right = _mm512_test_epi32_mask(lane, width);
        const __m512i upper = _mm512_mask_sub_epi32(lane, right, of_second, width);
        const __m512i lower = _mm512_mask_mov_epi32(_mm512_add_epi32(lane, width), right, of_second);
#pragma GCC unroll 16
        for (int row = 0; row < 16; row++)
            if (!(row & step)) {
                const __m512i first = rows[row], second = rows[row + step];
                rows[row] = _mm512_permutex2var_epi32(first, upper, second);
                rows[row + step] = _mm512_permutex2var_epi32(first, lower, second);
            }
    }
}

// `packed` starts at a multiple of 64 bytes, for stores that bypass the caches.
void pack(const bf16 *weight, long outputs, long inputs, bf16 *packed)
{
#pragma omp parallel for schedule(static)
    for (long output = 0; output < outputs; output += LANES)
        for (long input = 0; input < inputs; input += 2 * LANES) {
            __m512i rows[LANES];
            for (int row = 0; row < LANES; row++) {
                const bf16 *from = weight + (output + row) * inputs + input;
                _mm_prefetch((const char *)from + 512, _MM_HINT_T0);
                rows[row] = _mm512_loadu_si512(from);
            }
            transpose(rows);
            bf16 *to = packed + output * inputs + input * LANES;
            for (int pair = 0; pair < LANES; pair++) _mm512_stream_si512((void *)(to + pair * 2 * LANES), rows[pair]);
        }
}

// Inside a parallel region: spread rows of `inputs` numbers, `stride` apart. Threads share the inputs, because spread
// rows are adjacent.
static void spread_all(const bf16 *from, long rows, long stride, long inputs, bf16 *spreaded)
{
#pragma omp for schedule(static)
    for (long input = 0; input < inputs; input += LANES)
        for (long row = 0; row < rows; row++)
            spread(spreaded + row / ROWS * ROWS * inputs, row % ROWS, input, widened(from + row * stride + input));
}

// Inside a parallel region: to [rows, outputs] = spread rows times a weight, + bias and + `residual` unless NULL.
static void product(const bf16 *spreaded, long rows, long inputs, const bf16 *packed, long outputs, const bf16 *bias,
                    const bf16 *residual, bf16 *to)
{
#pragma omp for schedule(static)
    for (long next = 0; next < outputs; next += PANELS * LANES)
        for (long first = 0; first < rows; first += 2 * ROWS)
            for (long output = next, end = smaller(next + PANELS * LANES, outputs); output < end; output += 2 * LANES) {
                const long here = smaller(rows - first, 2 * ROWS), both = output + LANES < end;
                const bf16 *panel = packed + output * inputs, *other = both ? panel + LANES * inputs : 0;
                __m512 sums[2][2 * ROWS];
                multiply(here, spreaded + first * inputs, panel, other, inputs, sums);
                for (long row = 0; row < here; row++) // one cache line at a time
                    for (long side = 0; side <= both; side++) {
                        const long column = output + side * LANES, place = (first + row) * outputs + column;
                        __m512 sum = sums[side][row];
                        if (bias) sum = _mm512_add_ps(sum, widened(bias + column));
                        if (residual) sum = _mm512_add_ps(sum, widened(residual + place));
                        store(to + place, sum);
                    }
            }
}

void linear(const bf16 *from, long rows, long inputs, const bf16 *packed, long outputs, const bf16 *bias, bf16 *to,
            bf16 *spreaded)
{
#pragma omp parallel
    {
        begin_products();
        spread_all(from, rows, inputs, inputs, spreaded);
        product(spreaded, rows, inputs, packed, outputs, bias, 0, to);
        end_products();
    }
}

// Inside a parallel region. Each thread computes the scales of all rows, which is faster than waiting for the others.
static void norm(const bf16 *from, long rows, long size, float epsilon, const bf16 *weight, bf16 *spreaded)
{
    for (long first = 0; first < rows; first += ROWS) {
        const long here = smaller(rows - first, ROWS);
        float scales[ROWS];
        for (long row = 0; row < here; row++)
            scales[row] = inverse_root_mean_square(from + (first + row) * size, size, epsilon);
#pragma omp for schedule(static) nowait
        for (long column = 0; column < size; column += LANES)
            for (long row = 0; row < here; row++)
                spread(spreaded + first * size, row, column,
                       normed(from + (first + row) * size + column, scales[row], weight + column));
    }
#pragma omp barrier
}

// attention

// One head, in place: its norm if it has one, and rotary positions (Su et al. 2021; halves apart, as in transformers).
static void rotate(bf16 *head, long size, const bf16 *cosine, const bf16 *sine, const bf16 *weight, float epsilon)
{
    const long half = size / 2;
    const float scale = weight ? inverse_root_mean_square(head, size, epsilon) : 1.0f;
    for (long column = 0; column < half; column += LANES) {
        bf16 *low = head + column, *high = low + half;
        const __m512 a = weight ? rounded(normed(low, scale, weight + column)) : widened(low);
        const __m512 b = weight ? rounded(normed(high, scale, weight + half + column)) : widened(high);
        store(low, _mm512_fmsub_ps(a, widened(cosine + column), _mm512_mul_ps(b, widened(sine + column))));
        const __m512 turned = _mm512_mul_ps(a, widened(sine + half + column));
        store(high, _mm512_fmadd_ps(b, widened(cosine + half + column), turned));
    }
}

// The sums of sixteen registers, in their order. Pairs of registers become one register: each lane adds itself and the
// lane `width` away, of the first register if that bit of the lane is 0, of the second if it is 1.
static inline __m512 sums_of(__m512 *rows)
{
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
#pragma GCC unroll 4
    for (int width = LANES / 2; width; width /= 2) {
        const __mmask16 second = _mm512_test_epi32_mask(lane, _mm512_set1_epi32(width));
        const __m512i away = _mm512_xor_epi32(lane, _mm512_set1_epi32(width));
        const __m512i other = _mm512_mask_add_epi32(away, second, away, _mm512_set1_epi32(LANES));
#pragma GCC unroll 8
        for (int row = 0; row < width; row++)
            rows[row] = _mm512_add_ps(_mm512_mask_mov_ps(rows[row], second, rows[row + width]),
                                      _mm512_permutex2var_ps(rows[row], other, rows[row + width]));
    }
    return rows[0];
}

// `count` heads of one row that share keys and values: replace each query by the mean of `values`, weighted by the
// softmax of scale * query keys + mask. `room`: [count, columns rounded up to LANES].
static inline __attribute__((always_inline)) void attend(const int count, bf16 *queries, const bf16 *keys,
                                                         const bf16 *values, const bf16 *mask, long columns, long size,
                                                         float scale, float *room)
{
    const long width = (columns + LANES - 1) / LANES * LANES;
    __m512 shares[TOGETHER];
    for (int head = 0; head < count; head++) {
        const bf16 *query = queries + head * size;
        float *scores = room + head * width;
        __m512 most = _mm512_set1_ps(-__builtin_inff()), all = _mm512_setzero_ps();
        for (long column = 0; column < columns; column += LANES) {
            const long lanes = smaller(columns - column, LANES);
            const __mmask16 valid = (1u << lanes) - 1;
            __m512 sums[LANES];
            for (long lane = 0; lane < LANES; lane++) {
                sums[lane] = _mm512_setzero_ps();
                for (long number = 0; number < size && lane < lanes; number += 2 * LANES) {
                    const bf16 *key = keys + (column + lane) * size + number;
                    if (!head) _mm_prefetch((const char *)(key + 32 * size), _MM_HINT_T0);
                    if (!head) _mm_prefetch((const char *)(values + (column + lane) * size + number), _MM_HINT_T0);
                    sums[lane] = _mm512_dpbf16_ps(sums[lane], (__m512bh)_mm512_loadu_si512(query + number),
                                                  (__m512bh)_mm512_loadu_si512(key));
                }
            }
            const __m512i added = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask ? valid : 0, mask + column));
            const __m512 numbers = _mm512_fmadd_ps(_mm512_set1_ps(scale), sums_of(sums),
                                                 _mm512_castsi512_ps(_mm512_slli_epi32(added, 16)));
            most = _mm512_mask_max_ps(most, valid, most, numbers);
            _mm512_storeu_ps(scores + column, _mm512_mask_mov_ps(_mm512_set1_ps(-__builtin_inff()), valid, numbers));
        }
        most = _mm512_set1_ps(_mm512_reduce_max_ps(most));
        for (long column = 0; column < columns; column += LANES) {
            const __m512 numbers = exponential(_mm512_sub_ps(_mm512_loadu_ps(scores + column), most));
            _mm512_storeu_ps(scores + column, numbers);
            all = _mm512_add_ps(all, numbers);
        }
        shares[head] = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(all));
    }
    for (long number = 0; number < size; number += 2 * LANES) {
        __m512 sums[TOGETHER][2][2]; // of even and of odd columns, because each addition waits for the previous one
        for (int head = 0; head < count; head++)
            for (int part = 0; part < 4; part++) sums[head][part / 2][part % 2] = _mm512_setzero_ps();
        for (long column = 0; column < columns; column += 2)
            for (int odd = 0; odd < (column + 1 < columns ? 2 : 1); odd++)
                for (int half = 0; half < 2; half++) {
                    const __m512 value = widened(values + (column + odd) * size + number + half * LANES);
                    for (int head = 0; head < count; head++)
                        sums[head][odd][half] = _mm512_fmadd_ps(_mm512_set1_ps(room[head * width + column + odd]),
                                                                value, sums[head][odd][half]);
                }
        for (int head = 0; head < count; head++)
            for (int half = 0; half < 2; half++)
                store(queries + head * size + number + half * LANES,
                      _mm512_mul_ps(_mm512_add_ps(sums[head][0][half], sums[head][1][half]), shares[head]));
    }
}

// layers

// Inside a parallel region: hidden [rows, hidden], cosine and sine [rows, size] -> qkv [rows, heads + 2 groups, size],
// rotated; keys and values are also copied to the cache, [rows, groups, size] with strides of rows and groups.
static void before_attention(const Layer *layer, const bf16 *hidden, long rows, const bf16 *cosine, const bf16 *sine,
                             bf16 *qkv, bf16 *keys, bf16 *values, long row_stride, long group_stride, bf16 *spreaded)
{
    const long size = layer->size, rotated = layer->heads + layer->groups, all = rotated + layer->groups;
    norm(hidden, rows, layer->hidden, layer->epsilon, layer->norm, spreaded);
    product(spreaded, rows, layer->hidden, layer->qkv, all * size, layer->qkv_bias, 0, qkv);
#pragma omp for schedule(static)
    for (long row = 0; row < rows; row++)
        for (long head = 0; head < all; head++) {
            bf16 *numbers = qkv + (row * all + head) * size;
            if (head < rotated)
                rotate(numbers, size, cosine + row * size, sine + row * size,
                       head < layer->heads ? layer->query_norm : layer->key_norm, layer->epsilon);
            if (head < layer->heads) continue;
            const long group = head - (head < rotated ? layer->heads : rotated);
            bf16 *kept = (head < rotated ? keys : values) + row * row_stride + group * group_stride;
            __builtin_memcpy(kept, numbers, size * sizeof *numbers);
        }
}

// Inside a parallel region: hidden, qkv as above (its queries are overwritten), keys and values
// [rows, groups, columns, size], mask [rows, columns], added to scores, or NULL -> to [rows, hidden].
static void after_attention(const Layer *layer, const bf16 *hidden, long rows, bf16 *qkv, const bf16 *keys,
                            const bf16 *values, long row_stride, long group_stride, long columns, const bf16 *mask,
                            bf16 *to, bf16 *spreaded, float *room)
{
    const long size = layer->size, heads = layer->heads, width = heads * size, all = heads + 2 * layer->groups;
    const long shared = heads / layer->groups;
#pragma omp for schedule(static)
    for (long pair = 0; pair < rows * layer->groups; pair++) {
        const long row = pair / layer->groups, group = pair % layer->groups;
        const long kept = row * row_stride + group * group_stride;
        for (long head = 0; head < shared; head += TOGETHER) {
            bf16 *queries = qkv + (row * all + group * shared + head) * size;
            const bf16 *added = mask ? mask + row * columns : 0;
            switch (smaller(shared - head, TOGETHER)) {
            case 1: attend(1, queries, keys + kept, values + kept, added, columns, size, layer->scale, room); break;
            case 2: attend(2, queries, keys + kept, values + kept, added, columns, size, layer->scale, room); break;
            case 3: attend(3, queries, keys + kept, values + kept, added, columns, size, layer->scale, room); break;
            default: attend(TOGETHER, queries, keys + kept, values + kept, added, columns, size, layer->scale, room);
            }
        }
    }
    spread_all(qkv, rows, all * size, width, spreaded);
    product(spreaded, rows, width, layer->out, layer->hidden, layer->out_bias, hidden, to);
    norm(to, rows, layer->hidden, layer->epsilon, layer->mlp_norm, spreaded);
    // The gate and its input are computed together; neither is written to memory.
    bf16 *gated = spreaded + (rows + ROWS - 1) / ROWS * ROWS * layer->hidden;
#pragma omp for schedule(static)
    for (long output = 0; output < layer->inner; output += LANES)
        for (long first = 0; first < rows; first += 2 * ROWS) {
            const long here = smaller(rows - first, 2 * ROWS), weight = output * layer->hidden;
            __m512 sums[2][2 * ROWS];
            multiply(here, spreaded + first * layer->hidden, layer->gate + weight, layer->up + weight, layer->hidden,
                     sums);
            for (long row = 0; row < here; row++) {
                const __m512 gate = sums[0][row], silu = _mm512_mul_ps(gate, sigmoid(gate));
                spread(gated + (first + row / ROWS * ROWS) * layer->inner, row % ROWS, output,
                       _mm512_mul_ps(silu, sums[1][row]));
            }
        }
    product(gated, rows, layer->inner, layer->down, layer->hidden, 0, to, to);
}

// `count` layers in turn: hidden [rows, hidden], cosine and sine [rows, size], mask [rows, columns] or NULL
// -> to [rows, hidden]. `kept`: keys and values of each layer in turn, [rows, groups, columns, size] with strides of
// rows and groups; column `place` is written first.
// Temporary memory: qkv [rows, heads + 2 groups, size]; `spreaded`: rows, rounded up to ROWS, of
// the larger of heads * size and hidden + inner numbers; `rooms` [threads, TOGETHER, columns + LANES].
void decode(const Layer *layers, long count, const bf16 *hidden, long rows, const bf16 *cosine, const bf16 *sine,
            const bf16 *mask, bf16 *const *kept, long row_stride, long group_stride, long place, long columns, bf16 *to,
            bf16 *qkv, bf16 *spreaded, float *rooms)
{
#pragma omp parallel
    {
        begin_products();
        for (long number = 0; number < count; number++) {
            const Layer *layer = layers + number;
            const bf16 *from = number ? to : hidden;
            bf16 *keys = kept[2 * number], *values = kept[2 * number + 1];
            const long at = place * layer->size;
            before_attention(layer, from, rows, cosine, sine, qkv, keys + at, values + at, row_stride, group_stride,
                             spreaded);
            after_attention(layer, from, rows, qkv, keys, values, row_stride, group_stride, columns, mask, to, spreaded,
                            rooms + omp_get_thread_num() * TOGETHER * (columns + LANES));
        }
        end_products();
    }
}
