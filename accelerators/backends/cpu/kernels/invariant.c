// Products of matrices and softmax, whose numbers do not depend on how many rows are computed at the same time.
//
// A number of a product is one chain of multiply-adds in the order of the contracted dimension; a sum of a softmax is one
// chain of additions in the order of the columns. So tiles, threads and the other rows change nothing, and neither do
// columns whose factor is 0, as those of padding are. Numbers are float32, or bf16 that is computed in float32.
// Registers have 16 lanes on every processor, so that all add in the same order; those of numbers.h have the processor's.

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "threads.h"

enum { LANES = 16, WIDE = 2 * LANES, GROUP = 8, ROOM = 1 << 18 };
#ifdef __AVX512F__ // 32 registers: 24 sums, and what they are computed from
enum { TALL = 24, SHORT = 12 };
#else
enum { TALL = 6, SHORT = 3 };
#endif

typedef float vec __attribute__((vector_size(64)));
typedef float unaligned __attribute__((vector_size(64), aligned(4)));
typedef int32_t bits __attribute__((vector_size(64)));

typedef struct { // a batch of matrices: element (b, row, column) is at start + b * batch + row * rows + column * columns
    void *start;
    long batch, rows, columns;
} Matrix;

static inline float number(const void *start, long place, int bf16)
{
    if (!bf16) return ((const float *)start)[place];
    const uint32_t word = (uint32_t)((const uint16_t *)start)[place] << 16;
    float value;
    memcpy(&value, &word, 4);
    return value;
}

static inline void put(void *start, long place, float value, int bf16)
{
    if (!bf16) {
        ((float *)start)[place] = value;
        return;
    }
    uint32_t word;
    memcpy(&word, &value, 4);
    const int is_nan = value != value;
    ((uint16_t *)start)[place] = is_nan ? 0x7fc0 : (uint16_t)((word + 0x7fff + (word >> 16 & 1)) >> 16); // to even
}

// sums[row][vector] of LANES columns each: over k, panel[k][column] * rows[row][k]. Rows have a pointer for every three,
// because a processor has too few registers for one each.
#define TILE(NAME, ROWS, VECTORS)                                                                                      \
    static void NAME(const float *panel, long next, const float *rows, long apart, long step, long terms, vec *sums)   \
    {                                                                                                                  \
        vec sum[ROWS][VECTORS];                                                                                        \
        _Pragma("GCC unroll 24") for (int row = 0; row < ROWS; row++)                                                  \
            _Pragma("GCC unroll 2") for (int part = 0; part < VECTORS; part++) sum[row][part] = (vec){0};              \
        const float *from[ROWS / 3];                                                                                   \
        _Pragma("GCC unroll 8") for (int row = 0; row < ROWS / 3; row++) from[row] = rows + 3 * row * apart;           \
        for (long term = 0; term < terms; term++) {                                                                    \
            vec factor[VECTORS];                                                                                       \
            _Pragma("GCC unroll 2") for (int part = 0; part < VECTORS; part++)                                         \
                factor[part] = *(const unaligned *)(panel + part * LANES);                                             \
            _Pragma("GCC unroll 24") for (int row = 0; row < ROWS; row++) {                                            \
                const float other = from[row / 3][row % 3 * apart];                                                    \
                _Pragma("GCC unroll 2") for (int part = 0; part < VECTORS; part++)                                     \
                    sum[row][part] += factor[part] * other;                                                            \
            }                                                                                                          \
            panel += next;                                                                                             \
            _Pragma("GCC unroll 8") for (int row = 0; row < ROWS / 3; row++) from[row] += step;                        \
        }                                                                                                              \
        _Pragma("GCC unroll 24") for (int row = 0; row < ROWS; row++)                                                  \
            _Pragma("GCC unroll 2") for (int part = 0; part < VECTORS; part++)                                         \
                sums[row * VECTORS + part] = sum[row][part];                                                           \
    }
TILE(tile_tall, TALL, 1)
TILE(tile_wide, SHORT, 2)

// scale * sum + weight * added: one function for all tiles, so that each number is rounded in the same way.
static __attribute__((noinline)) void finish(vec *sums, const vec *added, long count, float scale, float weight)
{
    for (long item = 0; item < count; item++) {
        sums[item] = sums[item] * scale;
        if (added) sums[item] = sums[item] + added[item] * weight;
    }
}

// Copy LANES x LANES numbers, transposed: rows that are `step` apart to rows that are `next` apart.
static inline void transpose(const float *from, long step, float *to, long next)
{
#ifdef __clang__ // it has no __builtin_shuffle
    for (int lane = 0; lane < LANES; lane++)
        for (int row = 0; row < LANES; row++) to[lane * next + row] = from[row * step + lane];
#else
    vec rows[LANES], other[LANES];
    for (int row = 0; row < LANES; row++) rows[row] = *(const unaligned *)(from + row * step);
    _Pragma("GCC unroll 4") for (int distance = 1; distance < LANES; distance *= 2) // exchange blocks of this size
    {
        bits first, second;
        for (int lane = 0; lane < LANES; lane++) {
            first[lane] = lane & distance ? LANES + lane - distance : lane;
            second[lane] = lane & distance ? LANES + lane : lane + distance;
        }
        _Pragma("GCC unroll 16") for (int row = 0; row < LANES; row++)
        {
            if (row & distance) continue;
            other[row] = __builtin_shuffle(rows[row], rows[row + distance], first);
            other[row + distance] = __builtin_shuffle(rows[row], rows[row + distance], second);
        }
        for (int row = 0; row < LANES; row++) rows[row] = other[row];
    }
    for (int row = 0; row < LANES; row++) *(unaligned *)(to + row * next) = rows[row];
#endif
}

static void pack(float *panel, Matrix from, const char *start, long columns, long width, long terms, int bf16)
{
    const int quick = !bf16 && from.columns == 1 && columns == width && width % LANES == 0;
    const long whole = quick ? terms / LANES * LANES : 0;
    for (long term = 0; term < whole; term += LANES)
        for (long column = 0; column < width; column += LANES)
            transpose((const float *)start + column * from.rows + term, from.rows, panel + term * width + column, width);
    for (long term = whole; term < terms; term++)
        for (long column = 0; column < width; column++)
            panel[term * width + column] =
                column < columns ? number(start, column * from.rows + term * from.columns, bf16) : 0;
}

typedef struct {
    Matrix first, second, added, out;
    long count, others, terms;
    float scale, weight;
    int bf16;
    long panels, blocks, group, groups, ranges; // `group` panels at a time; ranges of blocks, for all threads
    long tasks, next;
} Products;

static void tasks_of_product(void *data)
{
    Products *all = data;
    const Matrix *first = &all->first, *second = &all->second, *added = &all->added, *out = &all->out;
    const long count = all->count, others = all->others, terms = all->terms, panels = all->panels, group = all->group;
    const long size = all->bf16 ? 2 : 4, width = count <= LANES ? LANES : WIDE, tall = count <= LANES ? TALL : SHORT;
    const int packs_rows = all->bf16 || second->columns != 1;
    float *room = aligned_alloc(64, sizeof(float) * ((group * width * terms + tall * terms) / 16 + 2) * 16);
    float *packed = room + group * width * terms;
    vec sums[24], extra[24];
    for (long task; (task = __atomic_fetch_add(&all->next, 1, __ATOMIC_RELAXED)) < all->tasks;) {
        const long item = task / (all->groups * all->ranges), range = task % all->ranges;
        const long start = task / all->ranges % all->groups * group, end = start + group < panels ? start + group : panels;
        const char *lanes = (const char *)first->start + item * first->batch * size;
        const char *rows = (const char *)second->start + item * second->batch * size;
        // A panel that is read once, from memory with its lanes side by side, needs no copy.
        const int direct = !all->bf16 && first->rows == 1 && all->blocks == 1;
        for (long panel = start; panel < end; panel++) {
            const long column = panel * width, rest = count - column < width ? count - column : width;
            if (direct && rest == width) continue;
            pack(room + (panel - start) * width * terms, *first, lanes + column * first->rows * size, rest, width, terms,
                 all->bf16);
        }
        const long last = all->blocks * (range + 1) / all->ranges;
        for (long block = all->blocks * range / all->ranges; block < last; block++) {
            const long row = block * tall, high = others - row < tall ? others - row : tall;
            const int packs = packs_rows || high < tall;
            if (packs) pack(packed, *second, rows + row * second->rows * size, high, tall, terms, all->bf16);
            for (long panel = start; panel < end; panel++) {
                const long column = panel * width, rest = count - column < width ? count - column : width;
                const int reads = direct && rest == width;
                const float *factors = reads ? (const float *)lanes + column : room + (panel - start) * width * terms;
                (width == WIDE ? tile_wide : tile_tall)(
                    factors, reads ? first->columns : width, packs ? packed : (const float *)rows + row * second->rows,
                    packs ? 1 : second->rows, packs ? tall : 1, terms, sums);
                float *numbers = (float *)sums, *more = (float *)extra;
                if (added->start)
                    for (long index = 0; index < high; index++)
                        for (long lane = 0; lane < rest; lane++)
                            more[index * width + lane] =
                                number(added->start,
                                       item * added->batch + (column + lane) * added->rows +
                                           (row + index) * added->columns,
                                       all->bf16);
                if (added->start || all->scale != 1)
                    finish(sums, added->start ? extra : NULL, high * width / LANES, all->scale, all->weight);
                const long place = item * out->batch + column * out->rows + row * out->columns;
                if (out->rows == 1 && !all->bf16)
                    for (long index = 0; index < high; index++)
                        memcpy((float *)out->start + place + index * out->columns, numbers + index * width, 4 * rest);
                else
                    for (long lane = 0; lane < rest; lane++)
                        for (long index = 0; index < high; index++)
                            put(out->start, place + lane * out->rows + index * out->columns,
                                numbers[index * width + lane], all->bf16);
            }
        }
    }
    free(room);
}

// out[b] = scale * first[b] second[b]' + weight * added[b]; first [count, terms], second [others, terms], out and added
// [count, others]. Rows of `first` are lanes of registers. added.start may be NULL.
void product(long batch, long count, long others, long terms, const Matrix *first, const Matrix *second,
             const Matrix *added, const Matrix *out, float scale, float weight, int bf16)
{
    const long width = count <= LANES ? LANES : WIDE, tall = count <= LANES ? TALL : SHORT, most = threads.most();
    const long panels = (count + width - 1) / width, blocks = (others + tall - 1) / tall, fit = ROOM / (width * (terms + 1));
    const long group = fit < 1 ? 1 : fit > GROUP ? GROUP : fit, groups = (panels + group - 1) / group;
    const long wanted = (2 * most + batch * groups - 1) / (batch * groups);
    const long ranges = most == 1 ? 1 : wanted > blocks ? blocks : wanted;
    Products all = {*first, *second, *added, *out, count, others, terms, scale, weight, bf16, panels, blocks,
                    group, groups, ranges, batch * groups * ranges, 0};
    threads.parallel(tasks_of_product, &all, batch * count * others * terms < 1 << 16, 0);
}

static inline vec choose(bits which, vec yes, vec no) { return (vec)(((bits)yes & which) | ((bits)no & ~which)); }

static inline vec exponential(vec x) // of x <= 0; relative error below 2e-7, exactly 0 below -87
{
    const vec lowest = (vec){0} - 87.0f;
    const vec z = choose(x > lowest, x, lowest);
    const vec whole = (z * 1.44269504f + 12582912.0f) - 12582912.0f; // to the nearest
    const vec rest = (z - whole * 0.693359375f) + whole * 2.12194440e-4f;
    vec sum = (vec){0} + 1.9875691e-4f; // Cephes' polynomial
    sum = sum * rest + 1.3981999e-3f;
    sum = sum * rest + 8.3334519e-3f;
    sum = sum * rest + 4.1665796e-2f;
    sum = sum * rest + 1.6666665e-1f;
    sum = sum * rest + 5.0000001e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    const vec power = (vec)((__builtin_convertvector(whole, bits) + 127) << 23);
    return choose(x == x, choose(x < lowest, (vec){0}, sum * power), x); // NaN stays NaN
}

enum { TOGETHER = 8 }; // rows, because an addition waits for the previous one

typedef struct {
    const void *from;
    void *to;
    long rows, columns;
    int bf16;
} Softmax;

static void softmax_share(void *data)
{
    const Softmax *task = data;
    const long columns = task->columns, width = (columns + LANES - 1) / LANES * LANES;
    float *room = aligned_alloc(64, sizeof(float) * TOGETHER * width);
    const Range groups = share((task->rows + TOGETHER - 1) / TOGETHER);
    for (long first = groups.first * TOGETHER; first < groups.end * TOGETHER && first < task->rows; first += TOGETHER) {
        const long count = task->rows - first < TOGETHER ? task->rows - first : TOGETHER;
        float sums[TOGETHER] = {0};
        for (long row = 0; row < count; row++) {
            float *values = room + row * width;
            vec most = (vec){0} - __builtin_inff();
            for (long column = 0; column < width; column++)
                values[column] = column < columns ? number(task->from, (first + row) * columns + column, task->bf16)
                                                  : -__builtin_inff();
            for (long column = 0; column < width; column += LANES) {
                const vec now = *(vec *)(values + column);
                most = choose(now > most, now, most);
            }
            float highest = most[0];
            for (int lane = 1; lane < LANES; lane++) highest = most[lane] > highest ? most[lane] : highest;
            for (long column = 0; column < width; column += LANES)
                *(vec *)(values + column) = exponential(*(vec *)(values + column) - highest);
        }
        for (long row = count; row < TOGETHER; row++) memset(room + row * width, 0, sizeof(float) * width);
        for (long column = 0; column < columns; column++)
            for (int row = 0; row < TOGETHER; row++) sums[row] += room[row * width + column];
        for (long row = 0; row < count; row++) {
            float *values = room + row * width;
            for (long column = 0; column < width; column += LANES) {
                const vec quotient = *(vec *)(values + column) / sums[row];
                *(vec *)(values + column) = quotient;
            }
            for (long column = 0; column < columns; column++)
                put(task->to, (first + row) * columns + column, values[column], task->bf16);
        }
    }
    free(room);
}

// Softmax of each of `rows` rows of `columns` numbers, one after the other in memory.
void softmax(const void *from, void *to, long rows, long columns, int bf16)
{
    Softmax task = {from, to, rows, columns, bf16};
    threads.parallel(softmax_share, &task, rows * columns <= 1 << 14, 0);
}
