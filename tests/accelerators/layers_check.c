// Compare layers.c, forward and backward, with plain loops in double; see check.h.

#include "layers.c"

#include "check.h"

static double square(double x) { return x * x; }

// How far a number is from that in double, in units of the sum of all terms without signs.
static double off(double found, double exact, double size) { return fabs(found - exact) / (size + 1e-3); }

static double error_of_norm(void)
{
    const long rows = 1 + drawn(40), size = LANES * (1 + drawn(9));
    const float epsilon = 1e-3f;
    number *from = numbers(rows * size, 3, 0), *weight = numbers(size, 0.5, 1), *given = numbers(rows * size, 1, 0);
    number *to = room(rows * size * sizeof(number)), *of_from = room(rows * size * sizeof(number));
    float *scales = room(rows * sizeof(float)), *of_weight = room(COUNT * size * sizeof(float));
    memset(of_weight, 0, COUNT * size * sizeof(float));
    norm(from, rows, size, epsilon, weight, to, scales);
    norm_backward(given, from, scales, rows, size, weight, of_from, of_weight);
    double largest = 0, plain_of_weight[size], terms_of_weight[size];
    memset(plain_of_weight, 0, sizeof plain_of_weight), memset(terms_of_weight, 0, sizeof terms_of_weight);
    for (long row = 0; row < rows; row++) {
        const number *x = from + row * size, *gradient = given + row * size;
        double squares = 0, along = 0, terms = 0;
        for (long column = 0; column < size; column++) squares += square(value(x[column])) / size;
        const double scale = 1 / sqrt(squares + epsilon);
        for (long column = 0; column < size; column++) {
            const double part = value(gradient[column]) * value(weight[column]) * value(x[column]);
            along += part, terms += fabs(part);
        }
        for (long column = 0; column < size; column++) {
            const double normed = value(x[column]) * scale, result = normed * value(weight[column]);
            largest = worse(largest, off(value(to[row * size + column]), result, fabs(result)));
            const double direct = value(gradient[column]) * value(weight[column]) * scale;
            const double less = value(x[column]) * scale * scale * scale / size;
            largest = worse(largest, off(value(of_from[row * size + column]), direct - along * less,
                                         fabs(direct) + fabs(terms * less)));
            plain_of_weight[column] += value(gradient[column]) * normed;
            terms_of_weight[column] += fabs(value(gradient[column]) * normed);
        }
    }
    for (long column = 0; column < size; column++) {
        double sum = 0;
        for (long thread = 0; thread < COUNT; thread++) sum += of_weight[thread * size + column];
        largest = worse(largest, off(sum, plain_of_weight[column], terms_of_weight[column]));
    }
    return largest;
}

static double error_of_gate(void)
{
    const long count = LANES * (1 + drawn(60));
    number *gates = numbers(count, 20, 0), *ups = numbers(count, 2, 0), *given = numbers(count, 1, 0);
    number *to = room(count * sizeof(number)), *of_gate = room(count * sizeof(number)), *of_up = room(count * sizeof(number));
    gate(gates, ups, count, to);
    gate_backward(given, gates, ups, count, of_gate, of_up);
    double largest = 0;
    for (long at = 0; at < count; at++) {
        const double x = value(gates[at]), part = 1 / (1 + exp(-x)), silu = x * part;
        const double slope = part * (1 + x * (1 - part)), gradient = value(given[at]), up = value(ups[at]);
        largest = worse(largest, off(value(to[at]), silu * up, fabs(silu * up)));
        largest = worse(largest, off(value(of_up[at]), gradient * silu, fabs(gradient * silu)));
        largest = worse(largest, off(value(of_gate[at]), gradient * up * slope, fabs(gradient * up * slope)));
    }
    return largest;
}

static int is_right(void)
{
    const double of_norm = error_of_norm(), of_gate = error_of_gate(), most = sizeof(number) == 2 ? 0.01 : 1e-5;
    printf("%.2e and %.2e\n", of_norm, of_gate);
    return of_norm < most && of_gate < most;
}

int main(int count, char **arguments) { return check_seeds(count, arguments, is_right); }
