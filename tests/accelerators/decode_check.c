// Compare decode.c, sample.c and softmax.c with plain loops in double; see check.h.

#include "decode.c"
#include "sample.c"
#include "softmax.c"

#include "check.h"

static Linear linear_of(long outputs, long inputs, number **weight, int interleaved, long experts)
{
    const long size = outputs * inputs, count = experts ? experts : 1;
    *weight = numbers(count * size, 1.7 / sqrt(inputs), 0);
    number *packed = room(count * size * sizeof(number));
    for (long expert = 0; expert < count; expert++)
        for (int half = 0; half <= interleaved; half++)
            pack(*weight + expert * size + half * size / 2, outputs / (1 + interleaved), inputs, packed + expert * size,
                 outputs, half, 1 + interleaved);
    return (Linear){packed, !experts && drawn(2) ? numbers(outputs, 0.5, 0) : 0, inputs, outputs};
}

static Norm norm_of(long size, int kind) // 0: none, 1: RMSNorm, 2: LayerNorm
{
    if (!kind) return (Norm){0};
    return (Norm){numbers(size, 0.5, 1), kind > 1 && drawn(2) ? numbers(size, 0.5, 0) : 0, 1e-3f, kind == 1 && drawn(2), kind > 1};
}

// the truth

static void norm_plainly(const Norm *norm, const double *from, long size, double *to)
{
    double mean = 0, squares = 0;
    if (norm->centered)
        for (long column = 0; column < size; column++) mean += from[column] / size;
    for (long column = 0; column < size; column++) squares += (from[column] - mean) * (from[column] - mean) / size;
    for (long column = 0; column < size; column++) {
        to[column] = (from[column] - mean) / sqrt(squares + norm->epsilon) * (value(norm->weight[column]) + norm->shift);
        if (norm->bias) to[column] += value(norm->bias[column]);
    }
}

// Row `output` of a weight is row `place` of packed outputs if a gate and its factor are interleaved.
static void multiply_plainly(const Linear *linear, const number *weight, int interleaved, const double *from, double *to)
{
    for (long output = 0; output < linear->outputs; output++) {
        const long half = linear->outputs / 2, place = output % half / LANES * 2 * LANES + output % LANES;
        const number *bias = !linear->bias ? 0 : linear->bias + (interleaved ? place + output / half * LANES : output);
        double sum = bias ? value(*bias) : 0;
        for (long input = 0; input < linear->inputs; input++)
            sum += value(weight[output * linear->inputs + input]) * from[input];
        to[output] = sum;
    }
}

static double activate_plainly(long activation, double x)
{
    if (activation == RELU) return x > 0 ? x : 0;
    if (activation == SILU) return x / (1 + exp(-x));
    if (activation == GELU) return x / 2 * (1 + erf(x / sqrt(2)));
    return x / 2 * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

static void rotate_plainly(const Layer *layer, double *head, const number *cosine, const number *sine)
{
    const long half = layer->rotary / 2;
    for (long column = 0; column < half; column++) {
        const double a = head[column], b = head[column + half];
        head[column] = a * value(cosine[column]) - b * value(sine[column]);
        head[column + half] = b * value(cosine[column + half]) + a * value(sine[column + half]);
    }
}

typedef struct {
    number *qkv, *out, *up, *down;
} Weights;

// The MLP of one row, or of one of its experts: inputs [hidden] -> sum [hidden].
static void mlp_plainly(const Layer *layer, const Weights *weights, long expert, const double *inputs, double *sum)
{
    const long inner = layer->down.inputs;
    double up[layer->up.outputs], active[inner];
    multiply_plainly(&layer->up, weights->up + expert * layer->up.outputs * layer->up.inputs, layer->gated, inputs, up);
    for (long place = 0; place < inner; place++)
        active[place] = activate_plainly(layer->activation, up[place]) * (layer->gated ? up[inner + place] : 1);
    multiply_plainly(&layer->down, weights->down + expert * layer->down.outputs * inner, 0, active, sum);
}

// hidden += the experts with the largest products, by their shares.
static void experts_plainly(const Layer *layer, const Weights *weights, const double *inputs, double *hidden)
{
    const Router *router = &layer->router;
    const long size = layer->qkv.inputs, count = router->experts;
    double shares[count], total = 0, taken = 0, sum[size], rounded_inputs[size];
    int is_chosen[count];
    memset(is_chosen, 0, sizeof is_chosen);
    for (long column = 0; column < size; column++) rounded_inputs[column] = value(nearest(inputs[column]));
    for (long expert = 0; expert < count; expert++) {
        double score = 0;
        for (long column = 0; column < size; column++)
            score += rounded_inputs[column] * value(router->weight[expert * size + column]);
        total += shares[expert] = exp(value(nearest(score)));
    }
    for (long rank = 0; rank < router->chosen; rank++) {
        long best = -1;
        for (long expert = 0; expert < count; expert++)
            if (!is_chosen[expert] && (best < 0 || shares[expert] > shares[best])) best = expert;
        is_chosen[best] = 1, taken += shares[best];
    }
    for (long expert = 0; expert < count; expert++) {
        if (!is_chosen[expert]) continue;
        mlp_plainly(layer, weights, expert, inputs, sum);
        for (long column = 0; column < size; column++)
            hidden[column] += sum[column] * shares[expert] / (router->scaled ? taken : total);
    }
}

// One layer for one row of numbers; keys and values [columns, groups, size] of its row of the batch are extended.
static void compute_plainly(const Layer *layer, const Weights *weights, const Step *step, long row, double *hidden,
                            double *keys, double *values)
{
    const long hidden_size = layer->qkv.inputs, size = layer->size, groups = layer->groups, heads = layer->heads;
    const long here = step->place + row % step->tokens;
    double normed_row[hidden_size], qkv[layer->qkv.outputs], mean[heads * size], sum[hidden_size], input[hidden_size];
    memcpy(input, hidden, sizeof input);
    norm_plainly(&layer->before_attention, hidden, hidden_size, normed_row);
    multiply_plainly(&layer->qkv, weights->qkv, 0, normed_row, qkv);
    for (long head = 0; head < heads + groups; head++) {
        const Norm *norm = head < heads ? &layer->query : &layer->key;
        if (norm->weight) norm_plainly(norm, qkv + head * size, size, qkv + head * size);
        rotate_plainly(layer, qkv + head * size, step->cosine + row * layer->rotary, step->sine + row * layer->rotary);
    }
    memcpy(keys + here * groups * size, qkv + heads * size, groups * size * sizeof *keys);
    memcpy(values + here * groups * size, qkv + (heads + groups) * size, groups * size * sizeof *values);
    for (long head = 0; head < heads; head++) {
        const long group = head / (heads / groups);
        double scores[step->columns], most = -INFINITY, total = 0;
        for (long column = 0; column <= here; column++) {
            double score = 0;
            for (long place = 0; place < size; place++)
                score += qkv[head * size + place] * keys[(column * groups + group) * size + place];
            score *= layer->scale;
            if (layer->cap) score = layer->cap * tanh(score / layer->cap);
            const long mask_head = step->mask_heads > 1 ? head : 0;
            if (step->mask) score += value(step->mask[(row * step->mask_heads + mask_head) * step->columns + column]);
            scores[column] = score;
            most = fmax(most, score);
        }
        const int sees_nothing = most == -INFINITY; // then the mean is 0
        for (long column = 0; column <= here; column++) total += scores[column] = exp(scores[column] - most);
        for (long place = 0; place < size; place++) {
            mean[head * size + place] = 0;
            for (long column = 0; column <= here && !sees_nothing; column++)
                mean[head * size + place] += scores[column] / total * values[(column * groups + group) * size + place];
        }
    }
    multiply_plainly(&layer->out, weights->out, 0, mean, sum);
    if (layer->after_attention.weight) norm_plainly(&layer->after_attention, sum, hidden_size, sum);
    for (long column = 0; column < hidden_size; column++) hidden[column] += sum[column];
    norm_plainly(&layer->before_mlp, layer->parallel ? input : hidden, hidden_size, normed_row);
    if (layer->router.experts) {
        experts_plainly(layer, weights, normed_row, hidden);
        return;
    }
    mlp_plainly(layer, weights, 0, normed_row, sum);
    if (layer->after_mlp.weight) norm_plainly(&layer->after_mlp, sum, hidden_size, sum);
    for (long column = 0; column < hidden_size; column++) hidden[column] += sum[column];
}

// one case

static double error_of_layers(void)
{
    enum { LAYERS = 2 };
    const long groups = 1 + drawn(3), heads = groups * (1 + drawn(6)), size = WORDS * (1 + drawn(3));
    const long hidden_size = WORDS * (1 + drawn(5)), inner = WORDS * (1 + drawn(6)), batch = 1 + drawn(20);
    const long places[] = {0, 3, 16, 40}, before = places[drawn(4)], steps = 2; // a prompt after `before`, then a token
    const long columns = before + 20 + drawn(3), all_heads = heads + 2 * groups;
    const long experts = drawn(3) ? 0 : 2 + drawn(6), chosen = 1 + drawn(2);
    const int gated = drawn(2), parallel = !experts && drawn(2), kind = 1 + drawn(2);
    const int after = parallel || experts ? 0 : drawn(2);
    const int of_heads = drawn(2), masked = drawn(3);
    const long rotary = drawn(3) ? size : drawn(2) ? size / 4 * 2 : 0, activation = drawn(4), prompt = 1 + drawn(18);
    const float cap = drawn(2) ? 1.5f : 0;
    Layer layers[LAYERS];
    Weights weights[LAYERS];
    number *kept[2 * LAYERS];
    double *truth[2 * LAYERS];
    for (int index = 0; index < LAYERS; index++) {
        Weights *of = weights + index;
        layers[index] = (Layer){heads, groups, size, rotary, activation, gated, parallel, 1 / sqrtf(size), cap,
                                .before_attention = norm_of(hidden_size, kind), .query = norm_of(size, of_heads),
                                .key = norm_of(size, of_heads), .after_attention = norm_of(hidden_size, after * kind),
                                .before_mlp = norm_of(hidden_size, kind), .after_mlp = norm_of(hidden_size, after * kind)};
        layers[index].qkv = linear_of(all_heads * size, hidden_size, &of->qkv, 0, 0);
        layers[index].out = linear_of(hidden_size, heads * size, &of->out, 0, 0);
        layers[index].up = linear_of((1 + gated) * inner, hidden_size, &of->up, gated, experts);
        layers[index].down = linear_of(hidden_size, inner, &of->down, 0, experts);
        if (experts) layers[index].router = (Router){numbers(experts * hidden_size, 1, 0), experts, chosen, drawn(2)};
        for (int part = 0; part < 2; part++) {
            const long count = batch * columns * groups * size;
            number *cache = kept[2 * index + part] = numbers(count, 1, 0); // [batch, groups, columns, size]
            double *plain = truth[2 * index + part] = room(count * sizeof(double));
            for (long place = 0; place < count; place++) {
                const long row = place / (groups * columns * size), group = place / (columns * size) % groups;
                const long column = place / size % columns;
                plain[((row * columns + column) * groups + group) * size + place % size] = value(cache[place]);
            }
        }
    }
    double squares = 0, errors = 0;
    for (int round = 0; round < steps; round++) {
        const long tokens = round ? 1 : prompt, rows = batch * tokens, place = round ? before + prompt : before;
        const long blocks = (rows + ROWS - 1) / ROWS * ROWS, mask_heads = masked > 1 ? heads : 1;
        number *hidden = numbers(rows * hidden_size, 1, 0), *to = room(rows * hidden_size * sizeof(number));
        number *mask = masked ? numbers(rows * mask_heads * columns, 1, -1) : 0;
        for (long head = 0; masked && head < rows * mask_heads; head++) {
            const int sees_nothing = !drawn(20);
            for (long column = 0; column < columns; column++)
                if (sees_nothing || (column && !drawn(3))) mask[head * columns + column] = nearest(-INFINITY);
        }
        const long wide = heads * size > hidden_size ? heads * size : hidden_size;
        Step step = {layers, LAYERS, rows, tokens, hidden, numbers(rows * rotary, 1, 0), numbers(rows * rotary, 1, 0),
                     mask, mask_heads, kept, 0, groups * columns * size, columns * size, place, columns, to,
                     room(rows * all_heads * size * sizeof(number)), room(rows * hidden_size * sizeof(number)),
                     room(blocks * wide * sizeof(number)), room(blocks * inner * sizeof(number)),
                     room(blocks * hidden_size * sizeof(number)), room(COUNT * TOGETHER * (columns + LANES) * sizeof(float)),
                     room(experts * rows * sizeof(float)), room(COUNT * rows * sizeof(long))};
        decode(&step);
        for (long row = 0; row < rows; row++) {
            double exact[hidden_size];
            for (long column = 0; column < hidden_size; column++) exact[column] = value(hidden[row * hidden_size + column]);
            for (int index = 0; index < LAYERS; index++) {
                const long offset = row / tokens * columns * groups * size;
                compute_plainly(layers + index, weights + index, &step, row, exact, truth[2 * index] + offset,
                                truth[2 * index + 1] + offset);
            }
            for (long column = 0; column < hidden_size; column++) {
                const double difference = value(to[row * hidden_size + column]) - exact[column];
                errors += difference * difference;
                squares += exact[column] * exact[column];
            }
        }
    }
    return sqrt(errors / squares);
}

// How far cumulative probabilities of drawn tokens and their log-probabilities are from those in double.
static double error_of_samples(void)
{
    const long rows = 1 + drawn(7), size = 1 + drawn(3000), stride = size + drawn(3);
    const double temperature = 0.5 + drawn(3);
    number *logits = numbers(rows * stride, 4, 0);
    float *uniforms = room(rows * sizeof(float)), *log_probs = room(rows * sizeof(float));
    int64_t *tokens = room(rows * sizeof(int64_t));
    for (long row = 0; row < rows; row++) uniforms[row] = drawn(1 << 20) / (float)(1 << 20);
    float *sums = room(COUNT * ((size + PART - 1) / PART) * sizeof(float));
    sample(&(Sample){logits, rows, stride, size, uniforms, 1 / temperature, sums, tokens, log_probs});
    double largest = 0;
    for (long row = 0; row < rows; row++) {
        if (tokens[row] < 0 || tokens[row] >= size) return INFINITY;
        double total = 0, before = 0;
        for (long token = 0; token < size; token++) {
            if (token == tokens[row]) before = total;
            total += exp(value(logits[row * stride + token]) / temperature);
        }
        const double own = exp(value(logits[row * stride + tokens[row]]) / temperature);
        const double outside = fmax(before / total - uniforms[row], uniforms[row] - (before + own) / total);
        largest = worse(largest, worse(outside, fabs(log_probs[row] - log(own / total))));
    }
    return largest;
}

// How far probabilities are from those in double; some columns are hidden, and in some rows all.
static double error_of_softmax(void)
{
    const long sizes[4] = {1 + drawn(3), 1 + drawn(3), 1 + drawn(3), 1 + drawn(5)}, columns = 1 + drawn(200);
    const int shared = drawn(2), none = !drawn(4); // one mask for all of the second and third size; no mask
    const long rows = sizes[0] * sizes[1] * sizes[2] * sizes[3];
    long steps[4] = {columns, columns, columns, columns};
    for (int next = 3, apart = columns; next >= 0; next--) {
        steps[next] = shared && (next == 1 || next == 2) ? 0 : apart;
        apart *= steps[next] ? sizes[next] : 1;
    }
    number *mask = numbers(rows * columns, 1, 0), *scores = numbers(rows * columns, 8, 0);
    for (long row = 0; row < rows; row++)
        for (long column = 0; column < columns; column++)
            if (!drawn(3) || row % 4 == 3) mask[row * columns + column] = nearest(-INFINITY);
    double *exact = room(rows * columns * sizeof(double)), largest = 0;
    for (long row = 0; row < rows; row++) {
        long place[4], rest = row, offset = 0;
        for (int next = 3; next >= 0; next--) place[next] = rest % sizes[next], rest /= sizes[next];
        for (int next = 0; next < 4; next++) offset += place[next] * steps[next];
        double top = -INFINITY, total = 0;
        for (long column = 0; column < columns; column++) {
            const double added = none ? 0 : value(mask[offset + column]);
            exact[row * columns + column] = 0.25 * value(scores[row * columns + column]) + added;
            top = fmax(top, exact[row * columns + column]);
        }
        for (long column = 0; column < columns; column++) {
            double *of = exact + row * columns + column;
            *of = top == -INFINITY ? 1 : exp(*of - top);
            total += *of;
        }
        for (long column = 0; column < columns; column++) exact[row * columns + column] /= total;
    }
    float *kept = room(COUNT * (columns / LANES * LANES + LANES) * sizeof(float));
    Softmax task = {scores, none ? 0 : mask, rows, columns, {0}, {0}, 0.25f, kept};
    memcpy(task.sizes, sizes, sizeof sizes), memcpy(task.steps, steps, sizeof steps);
    softmax(&task);
    for (long at = 0; at < rows * columns; at++) largest = worse(largest, fabs(value(scores[at]) - exact[at]));
    return largest;
}

static int is_right(void)
{
    const double of_layers = error_of_layers(), of_samples = error_of_samples(), of_softmax = error_of_softmax();
    const int is_bf16 = sizeof(number) == 2;
    printf("%.2e, %.2e and %.2e\n", of_layers, of_samples, of_softmax);
    return of_layers < (is_bf16 ? 0.05 : 1e-5) && of_samples < 1e-5 && of_softmax < (is_bf16 ? 2e-3 : 1e-6);
}

int main(int count, char **arguments) { return amx() < 0 ? 2 : check_seeds(count, arguments, is_right); }
