// Layers of training that change no shape, each in one pass over memory, forward and backward.

#include "numbers.h"
#include "threads.h"

// RMSNorm (Zhang and Sennrich 2019) of numbers with that scale, which transformers rounds before the weight.
static inline vector normed(const number *from, float scale, const number *weight)
{
    return rounded(load(from) * scale) * load(weight);
}

typedef struct {
    const number *from, *weight, *given; // given: gradient of `to`
    long rows, size;
    float epsilon, *scales, *of_weight;
    number *to;
} Norm;

static void norm_share(void *data)
{
    const Norm *task = data;
    const long size = task->size;
    const Range rows = share(task->rows);
    for (long row = rows.first; row < rows.end; row++) {
        const number *from = task->from + row * size;
        task->scales[row] = inverse_root_mean_square(from, size, task->epsilon);
        for (long column = 0; column < size; column += LANES)
            store(task->to + row * size + column, normed(from + column, task->scales[row], task->weight + column));
    }
}

// from [rows, size] -> to [rows, size], and the scale of each row for the backward pass.
void norm(const number *from, long rows, long size, float epsilon, const number *weight, number *to, float *scales)
{
    Norm task = {from, weight, 0, rows, size, epsilon, scales, 0, to};
    threads.parallel(norm_share, &task, 0, 0);
}

static void norm_backward_share(void *data)
{
    const Norm *task = data;
    const long size = task->size;
    const number *weight = task->weight;
    float *sums = task->of_weight + threads.number() * size;
    const Range rows = share(task->rows);
    for (long row = rows.first; row < rows.end; row++) {
        const number *x = task->from + row * size, *given = task->given + row * size;
        const float scale = task->scales[row];
        vector along = all(0); // of the gradient, in the direction of x
        for (long column = 0; column < size; column += LANES) {
            const vector gradient = load(given + column), numbers = load(x + column);
            along = gradient * load(weight + column) * numbers + along;
            put(sums + column, gradient * (numbers * scale) + floats_at(sums + column));
        }
        const float less = sum_of(along) * scale * scale * scale / size;
        for (long column = 0; column < size; column += LANES) {
            const vector plain = load(given + column) * load(weight + column);
            store(task->to + row * size + column, plain * scale - load(x + column) * less);
        }
    }
}

// Gradients: of_to [rows, size] -> of_from [rows, size] and of_weight [threads, size], which starts at 0 and whose sum
// is the gradient of the weight.
void norm_backward(const number *of_to, const number *from, const float *scales, long rows, long size,
                   const number *weight, number *of_from, float *of_weight)
{
    Norm task = {from, weight, of_to, rows, size, 0, (float *)scales, of_weight, of_from};
    threads.parallel(norm_backward_share, &task, 0, 0);
}

typedef struct {
    const number *given, *gate, *up; // given: gradient of the result
    long count;
    number *to, *of_up; // of the backward pass: gradients of gate and up
} Gate;

static void gate_share(void *data)
{
    const Gate *task = data;
    const Range chunks = share(task->count / LANES);
    for (long at = chunks.first * LANES; at < chunks.end * LANES; at += LANES) {
        const vector numbers = load(task->gate + at);
        store(task->to + at, rounded(numbers * sigmoid(numbers)) * load(task->up + at));
    }
}

// silu(gate) * up, of `count` numbers.
void gate(const number *gate, const number *up, long count, number *to)
{
    Gate task = {0, gate, up, count, to, 0};
    threads.parallel(gate_share, &task, 0, 0);
}

static void gate_backward_share(void *data)
{
    const Gate *task = data;
    const Range chunks = share(task->count / LANES);
    for (long at = chunks.first * LANES; at < chunks.end * LANES; at += LANES) {
        const vector given = load(task->given + at), numbers = load(task->gate + at), part = sigmoid(numbers);
        const vector slope = part * (numbers * (1.0f - part) + 1.0f);
        store(task->of_up + at, given * (numbers * part));
        store(task->to + at, given * load(task->up + at) * slope);
    }
}

void gate_backward(const number *of_to, const number *gate, const number *up, long count, number *of_gate,
                   number *of_up)
{
    Gate task = {of_to, gate, up, count, of_gate, of_up};
    threads.parallel(gate_backward_share, &task, 0, 0);
}

int lanes(void) { return LANES; }
