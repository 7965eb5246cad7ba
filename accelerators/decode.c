// One token more for each row: the decoder layers of models like Llama, in bf16, on processors with AVX512-BF16.
//
// A step reads every weight once and does little with it. Weights are therefore kept in the order in which they are
// read (`pack`), and a layer is two calls: up to its new keys and values, and from the cache on. All arrays are bf16
// and lie row after row; sums are float32. `decode.py` is the caller, and says what is asked of the sizes.

#include <omp.h>

#include "bf16.h"

enum {
    ROWS = 16,   // rows of a product that are computed at a time, in as many registers
    PANELS = 3,  // panels that a block of rows meets before the next block comes
    AHEAD = 8192 // bytes: weights are asked for so early, for the processor's own guess comes late (1.4 times as slow)
};

typedef struct {
    long hidden, heads, groups, size, inner; // sizes: `groups` key-value heads, `size` numbers in each head
    float epsilon, scale;
    const bf16 *norm, *qkv, *qkv_bias, *query_norm, *key_norm, *out, *out_bias, *mlp_norm, *gate, *up, *down;
} Layer; // biases and the norms of queries and keys may be NULL

// products
//
// A weight [outputs, inputs] is packed as panels of LANES outputs: pair by pair of inputs, two numbers of each output,
// which is what one instruction multiplies. What it is multiplied with is spread likewise: blocks of ROWS rows, pair by
// pair of inputs, two numbers of each row.

// Sixteen by sixteen pairs of numbers, columns for rows: blocks off the diagonal change places, small ones first.
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

// `packed` begins at a multiple of 64 bytes: it is written past the caches, which it would not fit in.
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

static inline void spread(bf16 *block, long row, long input, __m512 numbers) // of one row, LANES from `input` on
{
    const __m256i pairs = _mm256_set_epi32(7 * ROWS, 6 * ROWS, 5 * ROWS, 4 * ROWS, 3 * ROWS, 2 * ROWS, ROWS, 0);
    _mm256_i32scatter_epi32((int *)block + input / 2 * ROWS + row, pairs, narrowed(numbers), 4);
}

// Inside a parallel region: rows of `inputs` numbers, `stride` apart. Threads share the inputs, for rows lie side by side
// in what is spread.
static void spread_all(const bf16 *from, long rows, long stride, long inputs, bf16 *spreaded)
{
#pragma omp for schedule(static)
    for (long input = 0; input < inputs; input += LANES)
        for (long row = 0; row < rows; row++)
            spread(spreaded + row / ROWS * ROWS * inputs, row % ROWS, input, widened(from + row * stride + input));
}

#define MULTIPLY(COUNT)                                                                                                \
    static void multiply_##COUNT(const bf16 *block, const bf16 *panel, long pairs, __m512 *sums)                       \
    {                                                                                                                  \
        __m512 sum[COUNT];                                                                                             \
        for (int row = 0; row < COUNT; row++) sum[row] = _mm512_setzero_ps();                                          \
        for (long pair = 0; pair < pairs; pair++) {                                                                    \
            const bf16 *weights = panel + pair * 2 * LANES;                                                            \
            const int *numbers = (const int *)block + pair * ROWS;                                                     \
            const __m512bh read = (__m512bh)_mm512_loadu_si512(weights);                                               \
            _mm_prefetch((const char *)weights + AHEAD, _MM_HINT_T0);                                                  \
            for (int row = 0; row < COUNT; row++)                                                                      \
                sum[row] = _mm512_dpbf16_ps(sum[row], read, (__m512bh)_mm512_set1_epi32(numbers[row]));                \
        }                                                                                                              \
        for (int row = 0; row < COUNT; row++) sums[row] = sum[row];                                                    \
    }
MULTIPLY(4)
MULTIPLY(8)
MULTIPLY(12)
MULTIPLY(16)

// `rows` of a block times a panel: LANES outputs of each row.
static void multiply(long rows, const bf16 *block, const bf16 *panel, long inputs, __m512 *sums)
{
    (rows <= 4 ? multiply_4 : rows <= 8 ? multiply_8 : rows <= 12 ? multiply_12 : multiply_16)(
        block, panel, inputs / 2, sums);
}

static inline long block_rows(long rows, long first) { return rows - first < ROWS ? rows - first : ROWS; }

// Inside a parallel region: to [rows, outputs] = spread rows times a weight, + bias and + `residual` where there are any.
static void product(const bf16 *spreaded, long rows, long inputs, const bf16 *packed, long outputs, const bf16 *bias,
                    const bf16 *residual, bf16 *to)
{
#pragma omp for schedule(static)
    for (long next = 0; next < outputs; next += PANELS * LANES)
        for (long first = 0; first < rows; first += ROWS)
            for (long output = next; output < next + PANELS * LANES && output < outputs; output += LANES) {
                const long here = block_rows(rows, first);
                __m512 sums[ROWS];
                multiply(here, spreaded + first * inputs, packed + output * inputs, inputs, sums);
                for (long row = 0; row < here; row++) {
                    const long place = (first + row) * outputs + output;
                    __m512 sum = sums[row];
                    if (bias) sum = _mm512_add_ps(sum, widened(bias + output));
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
        spread_all(from, rows, inputs, inputs, spreaded);
        product(spreaded, rows, inputs, packed, outputs, bias, 0, to);
    }
}

// Inside a parallel region. Each thread finds out the scales of all rows: that is quicker than to wait for others.
static void norm(const bf16 *from, long rows, long size, float epsilon, const bf16 *weight, bf16 *spreaded)
{
    for (long first = 0; first < rows; first += ROWS) {
        const long here = block_rows(rows, first);
        float scales[ROWS];
        for (long row = 0; row < here; row++) scales[row] = inverse_root_mean_square(from + (first + row) * size, size, epsilon);
#pragma omp for schedule(static) nowait
        for (long column = 0; column < size; column += LANES)
            for (long row = 0; row < here; row++)
                spread(spreaded + first * size, row, column,
                       normed(from + (first + row) * size + column, scales[row], weight + column));
    }
#pragma omp barrier
}

// attention

// One head, in place: its norm if it has one, and rotary positions (Su et al. 2021; halves apart, as transformers does).
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

// One head of one row: in place of `query`, the mean of `values` by the softmax of scale * query keys + mask.
// `room`: [columns].
static void attend(bf16 *query, const bf16 *keys, const bf16 *values, const bf16 *mask, long columns, long size,
                   float scale, float *room)
{
    float most = -__builtin_inff();
    for (long column = 0; column < columns; column++) {
        __m512 sums = _mm512_setzero_ps();
        for (long number = 0; number < size; number += 2 * LANES) {
            const bf16 *key = keys + column * size + number;
            _mm_prefetch((const char *)key + AHEAD / 2, _MM_HINT_T0);
            _mm_prefetch((const char *)(values + column * size + number), _MM_HINT_T0);
            sums = _mm512_dpbf16_ps(sums, (__m512bh)_mm512_loadu_si512(query + number),
                                    (__m512bh)_mm512_loadu_si512(key));
        }
        const uint32_t added = mask ? (uint32_t)mask[column] << 16 : 0;
        float score;
        __builtin_memcpy(&score, &added, sizeof score);
        score += scale * _mm512_reduce_add_ps(sums);
        most = score > most ? score : most;
        room[column] = score;
    }
    __m512 all = _mm512_setzero_ps();
    for (long column = 0; column < columns; column += LANES) {
        const long left = columns - column;
        const __mmask16 there = left < LANES ? (1u << left) - 1 : 0xffff;
        const __m512 scores = _mm512_maskz_loadu_ps(there, room + column);
        const __m512 found = _mm512_maskz_mov_ps(there, exponential(_mm512_sub_ps(scores, _mm512_set1_ps(most))));
        _mm512_mask_storeu_ps(room + column, there, found);
        all = _mm512_add_ps(all, found);
    }
    const __m512 share = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(all));
    for (long number = 0; number < size; number += 2 * LANES) {
        __m512 even[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()}, odd[2] = {even[0], even[0]};
        const bf16 *value = values + number;
        long column = 0;
        for (; column + 1 < columns; column += 2, value += 2 * size)
            for (int half = 0; half < 2; half++) {
                const __m512 p = _mm512_set1_ps(room[column]), q = _mm512_set1_ps(room[column + 1]);
                even[half] = _mm512_fmadd_ps(p, widened(value + half * LANES), even[half]);
                odd[half] = _mm512_fmadd_ps(q, widened(value + size + half * LANES), odd[half]);
            }
        for (int half = 0; half < 2; half++) {
            if (column < columns)
                even[half] = _mm512_fmadd_ps(_mm512_set1_ps(room[column]), widened(value + half * LANES), even[half]);
            store(query + number + half * LANES, _mm512_mul_ps(_mm512_add_ps(even[half], odd[half]), share));
        }
    }
}

// the two calls of a layer

// hidden [rows, hidden], cosine and sine [rows, size] -> qkv [rows, heads + 2 groups, size], rotated. `spreaded`: rows,
// rounded up to ROWS, of hidden numbers.
void before_cache(const Layer *layer, const bf16 *hidden, long rows, const bf16 *cosine, const bf16 *sine, bf16 *qkv,
                  bf16 *spreaded)
{
    const long size = layer->size, rotated = layer->heads + layer->groups, all = rotated + layer->groups;
#pragma omp parallel
    {
        norm(hidden, rows, layer->hidden, layer->epsilon, layer->norm, spreaded);
        product(spreaded, rows, layer->hidden, layer->qkv, all * size, layer->qkv_bias, 0, qkv);
#pragma omp for schedule(static)
        for (long row = 0; row < rows; row++)
            for (long head = 0; head < rotated; head++)
                rotate(qkv + (row * all + head) * size, size, cosine + row * size, sine + row * size,
                       head < layer->heads ? layer->query_norm : layer->key_norm, layer->epsilon);
    }
}

// hidden [rows, hidden], queries [rows, heads + 2 groups, size] of which the heads are used up, keys and values
// [rows, groups, columns, size] with strides of rows and groups, mask [rows, columns], added to scores, or NULL -> to
// [rows, hidden]. `rooms`: [threads, columns]; `spreaded`: rows, rounded up to ROWS, of heads * size or hidden + inner
// numbers, whichever are more.
void after_cache(const Layer *layer, const bf16 *hidden, long rows, bf16 *queries, const bf16 *keys,
                 long key_row, long key_group, const bf16 *values, long value_row, long value_group, long columns,
                 const bf16 *mask, bf16 *to, bf16 *spreaded, float *rooms)
{
    const long size = layer->size, heads = layer->heads, width = heads * size, all = heads + 2 * layer->groups;
    const long shared = heads / layer->groups;
#pragma omp parallel
    {
        float *room = rooms + omp_get_thread_num() * columns;
#pragma omp for schedule(static)
        for (long each = 0; each < rows * layer->groups; each++) {
            const long row = each / layer->groups, group = each % layer->groups;
            for (long head = group * shared; head < (group + 1) * shared; head++)
                attend(queries + (row * all + head) * size, keys + row * key_row + group * key_group,
                       values + row * value_row + group * value_group, mask ? mask + row * columns : 0, columns,
                       size, layer->scale, room);
        }
        spread_all(queries, rows, all * size, width, spreaded);
        product(spreaded, rows, width, layer->out, layer->hidden, layer->out_bias, hidden, to);
        norm(to, rows, layer->hidden, layer->epsilon, layer->mlp_norm, spreaded);
        // The gate and what it lets through are two panels at a time: neither is written down.
        bf16 *gated = spreaded + (rows + ROWS - 1) / ROWS * ROWS * layer->hidden;
#pragma omp for schedule(static)
        for (long output = 0; output < layer->inner; output += LANES)
            for (long first = 0; first < rows; first += ROWS) {
                const long here = block_rows(rows, first);
                __m512 gates[ROWS], ups[ROWS];
                const bf16 *block = spreaded + first * layer->hidden;
                multiply(here, block, layer->gate + output * layer->hidden, layer->hidden, gates);
                multiply(here, block, layer->up + output * layer->hidden, layer->hidden, ups);
                for (long row = 0; row < here; row++) {
                    const __m512 silu = _mm512_mul_ps(gates[row], sigmoid(gates[row]));
                    spread(gated + first * layer->inner, row, output, _mm512_mul_ps(silu, ups[row]));
                }
            }
        product(gated, rows, layer->inner, layer->down, layer->hidden, 0, to, to);
    }
}
