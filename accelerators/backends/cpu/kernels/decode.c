// One more token for each row: the decoder layers of many families of models.
//
// A step reads every weight once. Weights are therefore stored in the order in which they are read (`pack`), and all
// layers are one call: code in between would run with caches full of weights. Arrays are numbers in row-major order; sums
// are float32. `decode.py` is the caller and checks the sizes.

#include "panels.h"

enum { TOGETHER = 4 }; // heads at a time that share their keys

typedef struct { // LayerNorm, RMSNorm if `centered` is 0, or nothing if `weight` is NULL
    const number *weight, *bias; // bias may be NULL
    float epsilon, shift;        // the factor is weight + shift
    long centered;
} Norm;

typedef struct {
    const number *packed, *bias; // bias may be NULL
    long inputs, outputs;
} Linear;

enum { SILU, GELU_TANH, GELU, RELU }; // activations

typedef struct {
    const number *weight;         // [experts, hidden]
    long experts, chosen, scaled; // experts of a layer, 0 if it has one MLP; of a row; scaled: their shares add up to 1
} Router;

typedef struct {
    long heads, groups, size, rotary; // `groups` key-value heads; `size` numbers in each head, `rotary` of them rotated
    long activation, gated;           // gated: panels of `up` are those of the gate and of its factor in turn
    long parallel;                    // the MLP reads the layer's input, not the attention's result
    float scale, cap;                 // of scores; cap 0: none
    Norm before_attention, query, key, after_attention, before_mlp, after_mlp;
    Linear qkv, out, up, down; // packed weights of experts follow each other
    Router router;
} Layer;

typedef struct { // of one call
    const Layer *layers;
    long count, rows, tokens;             // rows of numbers: `tokens` of each row of the batch, one after the other
    const number *hidden, *cosine, *sine; // [rows, hidden]; [rows, rotary]
    const number *mask;                   // [rows, heads or 1, columns], added to scores, or NULL
    long mask_heads;
    number *const *kept;                         // keys and values of each layer in turn, [rows, groups, columns, size]
    long first, row_stride, group_stride;        // the first row of the batch in kept, and strides of kept
    long place, columns;                         // the column that is written first
    number *to, *qkv, *sum;         // [rows, hidden]; room: [rows, heads + 2 groups, size]; [rows, hidden]
    number *heads, *inner, *inputs; // room for spread rows: of heads * size or hidden, inner, and hidden numbers
    float *scores;                  // room: [threads, TOGETHER, columns + LANES]
    float *shares;                  // room: [experts, rows], the shares of experts in rows; 0 for those not chosen
    long *order;                    // room: [threads, rows]
} Step;

// packing

// Transpose LANES x LANES words: blocks off the diagonal are exchanged, of WIDTH words.
#define UPPER(LANE, WIDTH) ((LANE) & (WIDTH) ? LANES + (LANE) - (WIDTH) : (LANE))
#define LOWER(LANE, WIDTH) ((LANE) & (WIDTH) ? LANES + (LANE) : (LANE) + (WIDTH))
#define EXCHANGE(WIDTH)                                                                                                \
    for (int row = 0; row < LANES; row++)                                                                              \
        if (!(row & (WIDTH))) {                                                                                        \
            const words first = rows[row], second = rows[row + (WIDTH)];                                               \
            rows[row] = LANES_OF(first, second, EACH(UPPER, WIDTH));                                                   \
            rows[row + (WIDTH)] = LANES_OF(first, second, EACH(LOWER, WIDTH));                                         \
        }

static inline void transpose(words *rows) { HALVING(EXCHANGE) }

static inline void stream(number *to, words numbers) // without reading `to` into the caches
{
#ifdef __AVX512F__
    _mm512_stream_si512((void *)to, (__m512i)numbers);
#else
    __builtin_memcpy(to, &numbers, sizeof numbers);
#endif
}

typedef struct {
    const number *weight;
    long outputs, inputs;
    number *packed;
    long all, first, step;
} Packing;

static void pack_share(void *data)
{
    const Packing *task = data;
    const Range panels = share(task->outputs / LANES);
    for (long index = panels.first; index < panels.end; index++) {
        const long panel = task->first + index * task->step, pair = panel / PANELS * PANELS;
        const long together = smaller(PANELS, task->all / LANES - pair);
        number *to = task->packed + pair * LANES * task->inputs + panel % PANELS * WORDS;
        for (long input = 0; input < task->inputs; input += WORDS) {
            words rows[LANES];
            for (int row = 0; row < LANES; row++) {
                const number *from = task->weight + (index * LANES + row) * task->inputs + input;
                __builtin_prefetch((const char *)from + 512);
                rows[row] = words_at(from);
            }
            transpose(rows);
            for (int word = 0; word < LANES; word++) stream(to + (input / PER_WORD + word) * together * WORDS, rows[word]);
        }
    }
}

// Pack weight [outputs, inputs] as panels `first`, `first` + `step`, ... of a weight of `all` outputs. `packed` starts at
// a multiple of 64 bytes, for stores that bypass the caches.
void pack(const number *weight, long outputs, long inputs, number *packed, long all, long first, long step)
{
    Packing task = {weight, outputs, inputs, packed, all, first, step};
    threads.parallel(pack_share, &task, 0, 0);
}

// products and norms; each is shared by all threads, which wait for each other at its end

typedef struct { // rows of an array: the first ones, or those in `order`
    long count;
    const long *order;
} Rows;

static inline long place_of(Rows rows, long row) { return rows.order ? rows.order[row] : row; }

static void spread_all(const number *from, Rows rows, long stride, long inputs, number *blocks)
{
    const Range chunks = share(inputs / LANES);
    for (long input = chunks.first * LANES; input < chunks.end * LANES; input += LANES)
        for (long row = 0; row < rows.count; row++)
            spread(blocks + row / ROWS * ROWS * inputs, row % ROWS, input,
                   load(from + place_of(rows, row) * stride + input));
    threads.barrier();
}

// to [rows, outputs] = spread rows times a weight, + bias, times the share of each row and + `residual`, unless NULL.
static void product(const Linear *linear, const number *blocks, Rows rows, const float *shares, const number *residual,
                    number *to)
{
    const long inputs = linear->inputs, outputs = linear->outputs, wide = PANELS * LANES;
    const Range groups = share((outputs + wide - 1) / wide);
    for (long output = groups.first * wide; output < smaller(groups.end * wide, outputs); output += wide)
        for (long first = 0; first < rows.count; first += 2 * ROWS) {
            const long here = smaller(rows.count - first, 2 * ROWS), panels = smaller(PANELS, (outputs - output) / LANES);
            vector sums[PANELS][2 * ROWS];
            multiply(first, rows.count, blocks, linear->packed + output * inputs, panels, inputs, sums);
            for (long row = 0; row < here; row++)
                for (long panel = 0; panel < panels; panel++) {
                    const long target = place_of(rows, first + row), column = output + panel * LANES;
                    vector sum = sums[panel][row];
                    if (linear->bias) sum += load(linear->bias + column);
                    if (shares) sum *= shares[target];
                    if (residual) sum += load(residual + target * outputs + column);
                    store(to + target * outputs + column, sum);
                }
        }
    threads.barrier();
}

static inline vector activated(long activation, vector x)
{
    if (activation == RELU) return larger(x, all(0));
    if (activation == SILU) return x * sigmoid(x);
    if (activation == GELU_TANH) return x * sigmoid(1.59576912f * (x + 0.044715f * x * x * x)); // 2 sqrt(2 / pi)
    // x / 2 (1 + erf(x / sqrt(2))); erf by Abramowitz and Stegun 7.1.26, absolute error below 2e-7
    const vector size = 0.70710678f * choose(x < 0, -x, x), t = 1.0f / (1.0f + 0.3275911f * size);
    const float series[] = {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f};
    vector sum = all(1.061405429f);
    for (int term = 0; term < 4; term++) sum = sum * t + series[term];
    const vector tail = 0.5f * sum * t * exponential(-size * size); // half of 1 - erf
    return x * choose(x < 0, tail, 1.0f - tail);
}

// inner = the activation of spread rows times `up`, or that of the gate times the other panel; spread.
static void activate_product(const Layer *layer, const Linear *up, const number *blocks, long rows, number *inner)
{
    const long wide = PANELS * LANES, width = layer->down.inputs, inputs = up->inputs;
    const Range groups = share((up->outputs + wide - 1) / wide);
    for (long output = groups.first * wide; output < smaller(groups.end * wide, up->outputs); output += wide)
        for (long first = 0; first < rows; first += 2 * ROWS) {
            const long here = smaller(rows - first, 2 * ROWS), panels = smaller(PANELS, (up->outputs - output) / LANES);
            vector sums[PANELS][2 * ROWS];
            multiply(first, rows, blocks, up->packed + output * inputs, panels, inputs, sums);
            for (long row = 0; row < here; row++) {
                vector numbers[PANELS];
                for (long panel = 0; panel < panels; panel++) {
                    numbers[panel] = sums[panel][row];
                    if (up->bias) numbers[panel] += load(up->bias + output + panel * LANES);
                }
                number *block = inner + (first + row) / ROWS * ROWS * width;
                const vector one = activated(layer->activation, numbers[0]);
                if (layer->gated)
                    spread(block, row % ROWS, output / 2, one * numbers[1]);
                else {
                    spread(block, row % ROWS, output, one);
                    if (panels > 1) spread(block, row % ROWS, output + LANES, activated(layer->activation, numbers[1]));
                }
            }
        }
    threads.barrier();
}

typedef struct {
    float mean, scale; // normed = (number - mean) * scale
} Moments;

static Moments moments_of(const Norm *norm, const number *from, long size)
{
    if (!norm->centered) return (Moments){0, inverse_root_mean_square(from, size, norm->epsilon)};
    vector sum = all(0), squares = all(0);
    for (long column = 0; column < size; column += LANES) sum += load(from + column);
    const float mean = sum_of(sum) / size;
    for (long column = 0; column < size; column += LANES) {
        const vector numbers = load(from + column) - mean;
        squares = numbers * numbers + squares;
    }
    return (Moments){mean, 1.0f / __builtin_sqrtf(sum_of(squares) / size + norm->epsilon)};
}

static inline vector normed(const Norm *norm, Moments moments, const number *from, long column)
{
    vector numbers = (load(from + column) - moments.mean) * moments.scale * (load(norm->weight + column) + norm->shift);
    if (norm->bias) numbers += load(norm->bias + column);
    return numbers;
}

// Spread the norm of rows. Each thread computes the moments of all rows, which is faster than waiting for the others.
static void spread_normed(const Norm *norm, const number *from, long rows, long size, number *blocks)
{
    const Range chunks = share(size / LANES);
    for (long first = 0; first < rows; first += ROWS) {
        const long here = smaller(rows - first, ROWS);
        Moments moments[ROWS];
        for (long row = 0; row < here; row++) moments[row] = moments_of(norm, from + (first + row) * size, size);
        for (long column = chunks.first * LANES; column < chunks.end * LANES; column += LANES)
            for (long row = 0; row < here; row++)
                spread(blocks + first * size, row, column,
                       normed(norm, moments[row], from + (first + row) * size, column));
    }
    threads.barrier();
}

// to = residual + the norm of rows.
static void add_normed(const Norm *norm, const number *from, long rows, long size, const number *residual, number *to)
{
    const Range mine = share(rows);
    for (long row = mine.first; row < mine.end; row++) {
        const Moments moments = moments_of(norm, from + row * size, size);
        for (long column = 0; column < size; column += LANES) {
            const vector numbers = normed(norm, moments, from + row * size, column);
            store(to + row * size + column, load(residual + row * size + column) + numbers);
        }
    }
    threads.barrier();
}

// attention

// One head, in place: its norm if it has one, and rotary positions (Su et al. 2021; halves apart, as in transformers).
static void rotate(number *head, const Layer *layer, const Norm *norm, const number *cosine, const number *sine)
{
    if (norm->weight) {
        const Moments moments = moments_of(norm, head, layer->size);
        for (long column = 0; column < layer->size; column += LANES)
            store(head + column, normed(norm, moments, head, column));
    }
    const long half = layer->rotary / 2, whole = half / LANES * LANES;
    for (long column = 0; column < whole; column += LANES) {
        number *low = head + column, *high = low + half;
        const vector a = load(low), b = load(high);
        store(low, a * load(cosine + column) - b * load(sine + column));
        store(high, b * load(cosine + half + column) + a * load(sine + half + column));
    }
    for (long column = whole; column < half; column++) {
        number *low = head + column, *high = low + half;
        const float a = value(*low), b = value(*high);
        *low = nearest(a * value(cosine[column]) - b * value(sine[column]));
        *high = nearest(b * value(cosine[half + column]) + a * value(sine[half + column]));
    }
}

// The sums of LANES registers, in their order. Pairs of registers become one register: each lane adds itself and the lane
// WIDTH away, of the first register if that bit of the lane is 0, of the second if it is 1.
#define SAME(LANE, WIDTH) ((LANE) & (WIDTH) ? LANES + (LANE) : (LANE))
#define OTHER(LANE, WIDTH) ((LANE) & (WIDTH) ? LANES + ((LANE) ^ (WIDTH)) : (LANE) ^ (WIDTH))
#define FOLD(WIDTH)                                                                                                    \
    for (int row = 0; row < (WIDTH); row++)                                                                            \
        numbers[row] = LANES_OF(numbers[row], numbers[row + (WIDTH)], EACH(SAME, WIDTH)) +                             \
                       LANES_OF(numbers[row], numbers[row + (WIDTH)], EACH(OTHER, WIDTH));

static inline vector sums_of(vector *numbers)
{
    HALVING(FOLD)
    return numbers[0];
}

// `count` heads of one row that share keys and values: replace each query by the mean of `values`, weighted by the
// softmax of the scores + mask. `mask` of a head is `apart` numbers after that of the previous head.
// `room`: [count, columns rounded up to LANES].
static inline __attribute__((always_inline)) void attend(const int count, const Layer *layer, number *queries,
                                                         const number *keys, const number *values, const number *mask,
                                                         long apart, long columns, float *room)
{
    const long width = (columns + LANES - 1) / LANES * LANES, size = layer->size;
    const vector nothing = all(-__builtin_inff());
    vector most[TOGETHER];
    float shares[TOGETHER];
    for (int head = 0; head < count; head++) most[head] = nothing;
    for (long column = 0; column < columns; column += LANES) { // these keys stay in the nearest cache for all heads
        const long lanes = smaller(columns - column, LANES);
        for (int head = 0; head < count; head++) {
            const number *query = queries + head * size;
            vector sums[LANES];
            for (long lane = 0; lane < LANES; lane++) {
                sums[lane] = all(0);
                for (long place = 0; place < size && lane < lanes; place += WORDS) {
                    const number *key = keys + (column + lane) * size + place;
                    if (!head) __builtin_prefetch(key + 32 * size);
                    if (!head) __builtin_prefetch(values + (column + lane) * size + place);
                    sums[lane] = dot(sums[lane], words_at(query + place), words_at(key));
                }
            }
            vector numbers = sums_of(sums) * layer->scale;
            if (layer->cap) numbers = layer->cap * (2.0f * sigmoid(2.0f / layer->cap * numbers) - 1.0f); // tanh
            if (mask) numbers += load_some(mask + head * apart + column, lanes);
            numbers = choose(below(lanes), numbers, nothing);
            most[head] = larger(most[head], numbers);
            put(room + head * width + column, numbers);
        }
    }
    for (int head = 0; head < count; head++) {
        float *scores = room + head * width;
        const float top = largest_of(most[head]);
        const float largest = top > -__FLT_MAX__ ? top : -__FLT_MAX__; // exponentials of -inf alone are 0, not NaN
        vector total = all(0);
        for (long column = 0; column < columns; column += LANES) {
            const vector numbers = exponential(floats_at(scores + column) - largest);
            put(scores + column, numbers);
            total += numbers;
        }
        const float sum = sum_of(total);
        shares[head] = sum == 0 ? 0 : 1.0f / sum; // a query that sees nothing gets 0
    }
    for (long place = 0; place < size; place += WORDS) {
        // Of even and of odd columns, because each addition waits for the previous one.
        vector sums[TOGETHER][2][PER_WORD];
        for (int head = 0; head < count; head++)
            for (int part = 0; part < 2 * PER_WORD; part++) sums[head][part / PER_WORD][part % PER_WORD] = all(0);
        for (long column = 0; column < columns; column += 2)
            for (int odd = 0; odd < (column + 1 < columns ? 2 : 1); odd++)
                for (int part = 0; part < PER_WORD; part++) {
                    const vector numbers = load(values + (column + odd) * size + place + part * LANES);
                    for (int head = 0; head < count; head++)
                        sums[head][odd][part] += room[head * width + column + odd] * numbers;
                }
        for (int head = 0; head < count; head++)
            for (int part = 0; part < PER_WORD; part++)
                store(queries + head * size + place + part * LANES,
                      (sums[head][0][part] + sums[head][1][part]) * shares[head]);
    }
}

// layers

// qkv [rows, heads + 2 groups, size] in place: queries and keys are rotated, keys and values also copied to the cache.
static void keep(const Layer *layer, const Step *step, number *keys, number *values)
{
    const long size = layer->size, rotated = layer->heads + layer->groups, all_heads = rotated + layer->groups;
    const Range mine = share(step->rows * all_heads);
    for (long index = mine.first; index < mine.end; index++) {
        const long row = index / all_heads, head = index % all_heads;
        number *numbers = step->qkv + index * size;
        if (head < rotated)
            rotate(numbers, layer, head < layer->heads ? &layer->query : &layer->key, step->cosine + row * layer->rotary,
                   step->sine + row * layer->rotary);
        if (head < layer->heads) continue;
        const long group = head - (head < rotated ? layer->heads : rotated);
        const long place = (step->first + row / step->tokens) * step->row_stride + group * step->group_stride;
        number *kept = (head < rotated ? keys : values) + place + (step->place + row % step->tokens) * size;
        __builtin_memcpy(kept, numbers, size * sizeof *numbers);
    }
    threads.barrier();
}

static void attend_all(const Layer *layer, const Step *step, const number *keys, const number *values)
{
    const long size = layer->size, shared = layer->heads / layer->groups, apart = step->columns * (step->mask_heads > 1);
    float *room = step->scores + threads.number() * TOGETHER * (step->columns + LANES);
    const Range mine = share(step->rows * layer->groups);
    for (long index = mine.first; index < mine.end; index++) {
        const long row = index / layer->groups, group = index % layer->groups;
        const long kept = (step->first + row / step->tokens) * step->row_stride + group * step->group_stride;
        const long columns = step->place + row % step->tokens + 1; // up to this token's own
        for (long next = 0; next < shared; next += TOGETHER) {
            const long head = group * shared + next, all_heads = layer->heads + 2 * layer->groups;
            number *queries = step->qkv + (row * all_heads + head) * size;
            const number *mask = step->mask ? step->mask + row * step->mask_heads * step->columns + head * apart : 0;
            switch (smaller(shared - next, TOGETHER)) {
            case 1: attend(1, layer, queries, keys + kept, values + kept, mask, apart, columns, room); break;
            case 2: attend(2, layer, queries, keys + kept, values + kept, mask, apart, columns, room); break;
            case 3: attend(3, layer, queries, keys + kept, values + kept, mask, apart, columns, room); break;
            default: attend(TOGETHER, layer, queries, keys + kept, values + kept, mask, apart, columns, room);
            }
        }
    }
    threads.barrier();
}

// to = residual + the product, or the norm of the product if there is one.
static void add_product(const Linear *linear, const Norm *norm, const Step *step, const number *blocks,
                        const number *residual)
{
    const Rows rows = {step->rows, 0};
    product(linear, blocks, rows, 0, norm->weight ? 0 : residual, norm->weight ? step->sum : step->to);
    if (norm->weight) add_normed(norm, step->sum, step->rows, linear->outputs, residual, step->to);
}

// The shares of experts in each row: the largest of the softmax of router products. `sum` becomes the norm of rows.
static void choose_experts(const Layer *layer, const Step *step)
{
    const Router *router = &layer->router;
    const long size = layer->qkv.inputs, rows = step->rows;
    const Range mine = share(rows);
    for (long row = mine.first; row < mine.end; row++) {
        const Moments moments = moments_of(&layer->before_mlp, step->to + row * size, size);
        number *inputs = step->sum + row * size;
        float *shares = step->shares + row, largest = -__FLT_MAX__, total = 0, taken = 0;
        for (long column = 0; column < size; column += LANES)
            store(inputs + column, normed(&layer->before_mlp, moments, step->to + row * size, column));
        for (long expert = 0; expert < router->experts; expert++) {
            vector sum = all(0);
            for (long column = 0; column < size; column += WORDS)
                sum = dot(sum, words_at(inputs + column), words_at(router->weight + expert * size + column));
            const float score = value(nearest(sum_of(sum)));
            shares[expert * rows] = score;
            if (score > largest) largest = score;
        }
        for (long expert = 0; expert < router->experts; expert++) {
            shares[expert * rows] = exponential(all(shares[expert * rows] - largest))[0];
            total += shares[expert * rows];
        }
        for (long rank = 0; rank < router->chosen; rank++) { // chosen shares are negative until all are known
            long best = 0;
            for (long expert = 1; expert < router->experts; expert++)
                if (shares[expert * rows] > shares[best * rows]) best = expert;
            taken += shares[best * rows];
            shares[best * rows] = -shares[best * rows];
        }
        for (long expert = 0; expert < router->experts; expert++) {
            const float chosen = shares[expert * rows] < 0 ? -shares[expert * rows] : 0;
            shares[expert * rows] = value(nearest(chosen / (router->scaled ? taken : total)));
        }
    }
    threads.barrier();
}

// to += each expert's MLP of the rows that chose it, times its share.
static void add_experts(const Layer *layer, const Step *step)
{
    long *order = step->order + threads.number() * step->rows;
    choose_experts(layer, step);
    for (long expert = 0; expert < layer->router.experts; expert++) {
        const float *shares = step->shares + expert * step->rows;
        Rows rows = {0, order};
        for (long row = 0; row < step->rows; row++)
            if (shares[row]) order[rows.count++] = row;
        if (!rows.count) continue;
        Linear up = layer->up, down = layer->down;
        up.packed += expert * up.outputs * up.inputs;
        down.packed += expert * down.outputs * down.inputs;
        spread_all(step->sum, rows, up.inputs, up.inputs, step->inputs);
        activate_product(layer, &up, step->inputs, rows.count, step->inner);
        product(&down, step->inner, rows, shares, step->to, step->to);
    }
}

static void compute(const Layer *layer, const Step *step, const number *hidden, number *keys, number *values)
{
    const Rows all_rows = {step->rows, 0};
    const long rows = step->rows, size = layer->qkv.inputs, width = layer->heads * layer->size;
    spread_normed(&layer->before_attention, hidden, rows, size, step->heads);
    if (layer->parallel) spread_normed(&layer->before_mlp, hidden, rows, size, step->inputs); // `to` may be `hidden`
    product(&layer->qkv, step->heads, all_rows, 0, 0, step->qkv);
    keep(layer, step, keys, values);
    attend_all(layer, step, keys, values);
    spread_all(step->qkv, all_rows, width + 2 * layer->groups * layer->size, width, step->heads);
    add_product(&layer->out, &layer->after_attention, step, step->heads, hidden);
    if (layer->router.experts) {
        add_experts(layer, step);
        return;
    }
    if (!layer->parallel) spread_normed(&layer->before_mlp, step->to, rows, size, step->inputs);
    activate_product(layer, &layer->up, step->inputs, rows, step->inner);
    add_product(&layer->down, &layer->after_mlp, step, step->inner, step->to);
}

static void decode_share(void *data)
{
    const Step *step = data;
    begin_products();
    for (long index = 0; index < step->count; index++)
        compute(step->layers + index, step, index ? step->to : step->hidden, step->kept[2 * index],
                step->kept[2 * index + 1]);
    end_products();
}

// `count` layers in turn.
void decode(const Step *step) { threads.parallel(decode_share, (void *)step, 0, 0); }

typedef struct {
    const Linear *linear;
    const number *from;
    long rows;
    number *to, *blocks;
} Product;

static void linear_share(void *data)
{
    const Product *task = data;
    begin_products();
    const Rows rows = {task->rows, 0};
    spread_all(task->from, rows, task->linear->inputs, task->linear->inputs, task->blocks);
    product(task->linear, task->blocks, rows, 0, 0, task->to);
    end_products();
}

// to [rows, outputs] = from [rows, inputs] times a weight + bias. Room: blocks, of rows rounded up to ROWS.
void linear(const Linear *linear, const number *from, long rows, number *to, number *blocks)
{
    Product task = {linear, from, rows, to, blocks};
    threads.parallel(linear_share, &task, 0, 0);
}

// Sizes that the caller's buffers depend on.
int lanes(void) { return LANES; }
int heads_at_once(void) { return TOGETHER; }
int rows_at_once(void) { return ROWS; }
