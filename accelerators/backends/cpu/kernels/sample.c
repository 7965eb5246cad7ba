// One token of each row by its distribution: the inverse of the cumulative distribution at a uniform number.

#include "numbers.h"
#include "threads.h"

enum { PART = 1024 }; // numbers whose sum is kept; a multiple of LANES

typedef struct {
    const number *logits; // [rows, size], `stride` numbers from row to row
    long rows, stride, size;
    const float *uniform; // [rows], in [0, 1)
    float factor;         // 1 / temperature
    float *sums;          // room: [threads, size / PART rounded up]
    int64_t *tokens;      // [rows]
    float *log_probs;     // [rows], of the tokens
} Sample;

// Logits from `column` on; those past the end are -inf.
static inline vector logits_at(const Sample *task, const number *row, long column)
{
    if (column + LANES <= task->size) return load(row + column);
    float rest[LANES];
    for (long lane = 0; lane < LANES; lane++)
        rest[lane] = column + lane < task->size ? value(row[column + lane]) : -__builtin_inff();
    return floats_at(rest);
}

static inline vector weights_at(const Sample *task, const number *row, long column, float top)
{
    return exponential((logits_at(task, row, column) - top) * task->factor);
}

static void sample_row(const Sample *task, long index, float *sums)
{
    const number *row = task->logits + index * task->stride;
    vector largest = all(-__builtin_inff());
    for (long column = 0; column < task->size; column += LANES) largest = larger(largest, logits_at(task, row, column));
    const float top = largest_of(largest);
    const long parts = (task->size + PART - 1) / PART;
    double total = 0;
    for (long part = 0; part < parts; part++) {
        vector sum = all(0);
        const long end = (part + 1) * PART < task->size ? (part + 1) * PART : task->size;
        for (long column = part * PART; column < end; column += LANES) sum += weights_at(task, row, column, top);
        total += sums[part] = sum_of(sum);
    }
    // The part, then the number in it, at which the running sum exceeds the target; or else the last ones above 0.
    double before = 0, rest = 0;
    long chosen = 0;
    for (long part = 0; part < parts; part++)
        if (sums[part] > 0) {
            chosen = part;
            rest = task->uniform[index] * total - before;
            if (sums[part] > rest) break;
            before += sums[part];
        }
    long token = 0;
    for (long column = chosen * PART; column < task->size && column < (chosen + 1) * PART; column += LANES) {
        const vector weights = weights_at(task, row, column, top);
        for (long lane = 0; lane < LANES; lane++)
            if (weights[lane] > 0 && rest >= 0) {
                token = column + lane;
                rest -= weights[lane];
            }
    }
    task->tokens[index] = token;
    task->log_probs[index] = (value(row[token]) - top) * task->factor - __builtin_logf(total);
}

static void sample_share(void *data)
{
    const Sample *task = data;
    const Range rows = share(task->rows);
    float *sums = task->sums + threads.number() * ((task->size + PART - 1) / PART);
    for (long row = rows.first; row < rows.end; row++) sample_row(task, row, sums);
}

void sample(const Sample *task) { threads.parallel(sample_share, (void *)task, 0, 0); }

long part(void) { return PART; }
