// Compare invariant.c with plain loops in double; see check.h.

#include "invariant.c"

#include "check.h"

static double at(const Matrix *of, long batch, long row, long column, int bf16)
{
    return number(of->start, batch * of->batch + row * of->rows + column * of->columns, bf16);
}

// Matrices by rows or by columns, some with numbers between that belong to none.
static Matrix matrices(long batch, long rows, long columns, int bf16)
{
    const int by_columns = drawn(2);
    const long inner = by_columns ? rows : columns, outer = by_columns ? columns : rows, apart = inner + drawn(3);
    const long count = (batch - 1) * outer * apart + (outer - 1) * apart + inner;
    void *start = room(count * (bf16 ? 2 : 4));
    for (long place = 0; place < count; place++) put(start, place, uniform(), bf16);
    return (Matrix){start, outer * apart, by_columns ? 1 : apart, by_columns ? apart : 1};
}

// The largest error of scale * first second' + weight * added, divided by the sum of all terms without signs.
static double error_of_product(int bf16)
{
    const long batch = 1 + drawn(3), count = 1 + drawn(90), others = 1 + drawn(60), terms = 1 + drawn(drawn(8) ? 130 : 3000);
    const Matrix first = matrices(batch, count, terms, bf16), second = matrices(batch, others, terms, bf16);
    const Matrix added = drawn(2) ? matrices(batch, count, others, bf16) : (Matrix){0};
    const Matrix out = matrices(batch, count, others, bf16);
    const float scale = drawn(2) ? 1 : 0.7f, weight = drawn(2) ? 1 : 0.3f;
    product(batch, count, others, terms, &first, &second, &added, &out, scale, weight, bf16);
    double largest = 0;
    for (long item = 0; item < batch; item++)
        for (long row = 0; row < count; row++)
            for (long column = 0; column < others; column++) {
                const double plus = added.start ? weight * at(&added, item, row, column, bf16) : 0;
                double sum = plus, size = fabs(plus);
                for (long term = 0; term < terms; term++) {
                    const double part = scale * at(&first, item, row, term, bf16) * at(&second, item, column, term, bf16);
                    sum += part, size += fabs(part);
                }
                largest = worse(largest, fabs(at(&out, item, row, column, bf16) - sum) / (size + 1e-3));
            }
    return largest;
}

static double error_of_softmax(int bf16)
{
    const long rows = 1 + drawn(30), columns = 1 + drawn(150);
    void *from = room(rows * columns * (bf16 ? 2 : 4)), *to = room(rows * columns * (bf16 ? 2 : 4));
    for (long place = 0; place < rows * columns; place++)
        put(from, place, place % columns && !drawn(4) ? -INFINITY : 8 * uniform(), bf16);
    softmax(from, to, rows, columns, bf16);
    double largest = 0;
    for (long row = 0; row < rows; row++) {
        double total = 0;
        for (long column = 0; column < columns; column++) total += exp(number(from, row * columns + column, bf16));
        for (long column = 0; column < columns; column++) {
            const double exact = exp(number(from, row * columns + column, bf16)) / total;
            largest = worse(largest, fabs(number(to, row * columns + column, bf16) - exact));
        }
    }
    return largest;
}

static int is_right(void)
{
    int right = 1;
    for (int bf16 = 0; bf16 < 2; bf16++) {
        const double of_product = error_of_product(bf16), of_softmax = error_of_softmax(bf16);
        printf("%.2e and %.2e%s", of_product, of_softmax, bf16 ? "\n" : ", ");
        right &= of_product < (bf16 ? 0.004 : 1e-6) && of_softmax < (bf16 ? 0.004 : 1e-6);
    }
    return right;
}

int main(int count, char **arguments) { return check_seeds(count, arguments, is_right); }
