// Softmax of scaled and masked scores in place, with all numbers of a row in float32.

#include "numbers.h"
#include "threads.h"

typedef struct {
    number *scores;     // [rows, columns]; become probabilities
    const number *mask; // to add to the scaled scores; NULL: none
    long rows, columns;
    long sizes[4], steps[4]; // rows are [sizes]; one further in each, the mask is `steps` numbers further
    float scale;
    float *room; // [threads, columns / LANES * LANES + LANES]
} Softmax;

static const number *mask_of(const Softmax *task, long row)
{
    long offset = 0;
    for (int dimension = 3; dimension >= 0; dimension--) {
        offset += row % task->sizes[dimension] * task->steps[dimension];
        row /= task->sizes[dimension];
    }
    return task->mask + offset;
}

// LANES scores from `column` on, scaled and masked, or `count` of them and -inf.
static inline vector masked(const number *scores, const number *mask, float scale, long column, long count)
{
    vector numbers = load_some(scores + column, count) * scale;
    // -inf becomes a number, for rows that consist of it: they get equal probabilities.
    if (mask) numbers += larger(load_some(mask + column, count), all(-3.3895314e38f));
    return count >= LANES ? numbers : choose(below(count), numbers, all(-__builtin_inff()));
}

static void softmax_share(void *data)
{
    const Softmax *task = data;
    const long columns = task->columns, whole = columns / LANES * LANES, rest = columns - whole;
    float *room = task->room + threads.number() * (whole + LANES);
    const Range rows = share(task->rows);
    for (long row = rows.first; row < rows.end; row++) {
        number *scores = task->scores + row * columns;
        const number *mask = task->mask ? mask_of(task, row) : 0;
        vector most = masked(scores, mask, task->scale, whole, rest), total = all(0);
        put(room + whole, most);
        for (long column = 0; column < whole; column += LANES) {
            const vector numbers = masked(scores, mask, task->scale, column, LANES);
            most = larger(most, numbers);
            put(room + column, numbers);
        }
        const float top = largest_of(most);
        for (long column = 0; column < columns; column += LANES) {
            const vector numbers = exponential(floats_at(room + column) - top);
            total += numbers;
            put(room + column, numbers);
        }
        const float part = 1.0f / sum_of(total);
        for (long column = 0; column < whole; column += LANES)
            store(scores + column, floats_at(room + column) * part);
        store_some(scores + whole, floats_at(room + whole) * part, rest);
    }
}

void softmax(const Softmax *task) { threads.parallel(softmax_share, (void *)task, 0, 0); }
