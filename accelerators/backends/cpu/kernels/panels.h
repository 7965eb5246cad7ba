// Products of a few rows with a packed weight: by AMX if the processor has it and numbers are bf16, else by vectors.
//
// A weight [outputs, inputs] is packed as panels of LANES outputs: word by word of inputs, one word of each output.
// PANELS neighbours are interleaved word by word, so that a thread reads a weight from its beginning to its end.
// The other factor is spread: blocks of ROWS rows, in the order of the instructions.

#include "numbers.h"
#include "threads.h"

static inline long smaller(long a, long b) { return a < b ? a : b; }

enum { ROWS = 16, PANELS = 2, LINE = 64 }; // LINE: bytes of a line of the caches

#if defined BF16 && defined __AMX_BF16__

#include <sys/syscall.h>
#include <unistd.h>

// A tile has sixteen rows of 64 bytes: 16 words of a panel, or 16 words of 16 rows of a block.
enum { TILE = 32 };

// Return 1 if AMX is used, -1 if the system does not let this process use it.
int amx(void) { return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) ? -1 : 1; }

static inline void begin_products(void) // on each thread
{
    static const struct {
        uint8_t palette, unused[15];
        uint16_t bytes[16];
        uint8_t rows[16];
    } tiles = {1, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    _tile_loadconfig(&tiles);
}

static inline void end_products(void) { _tile_release(); }

static inline void spread(number *block, long row, long input, vector numbers) // LANES numbers of one row, from `input`
{
    store(block + input / TILE * TILE * ROWS + row * TILE + input % TILE, numbers);
}

// Rows `first` to `first` + 2 * ROWS of `rows` in blocks, times one or two interleaved panels: sums[panel][row] of LANES
// outputs.
// Tiles: 0 to 3 are sums, 4 and 5 blocks, 6 and 7 panels. Several sums at a time, because an addition waits for the
// previous one and each loaded tile is used twice.
static void multiply(long first, long rows, const number *blocks, const number *packed, long panels, long inputs,
                     vector sums[PANELS][2 * ROWS])
{
    const int both = rows - first > ROWS, other = panels > 1;
    blocks += first * inputs;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long input = 0; input < inputs; input += TILE) {
        _tile_loadd(4, blocks + input * ROWS, 64);
        _tile_loadd(6, packed + input * LANES * panels, 64 * panels);
        _tile_dpbf16ps(0, 4, 6);
        if (both) {
            _tile_loadd(5, blocks + (inputs + input) * ROWS, 64);
            _tile_dpbf16ps(1, 5, 6);
        }
        if (other) {
            _tile_loadd(7, packed + input * LANES * panels + WORDS, 64 * panels);
            _tile_dpbf16ps(2, 4, 7);
            if (both) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums[0], 64);
    if (both) _tile_stored(1, sums[0] + ROWS, 64);
    if (other) _tile_stored(2, sums[1], 64);
    if (both && other) _tile_stored(3, sums[1] + ROWS, 64);
}

#else

// Rows at a time: `TALL`, and 4 or `LOW` for the last ones of a block.
#if defined __AVX512F__ || defined __aarch64__
enum { TALL = 8, LOW = 4 }; // 16 of 32 registers are sums
#else
enum { TALL = 6, LOW = 2 }; // 12 of 16
#endif

int amx(void) { return 0; }

static inline void begin_products(void) {}

static inline void end_products(void) {}

// A block is spread word by word of inputs, one word of each row.
static inline void spread(number *block, long row, long input, vector numbers) // LANES numbers of one row, from `input`
{
    number stored[LANES];
    store(stored, numbers);
    number *to = block + input * ROWS + row * PER_WORD;
    for (int lane = 0; lane < LANES; lane += PER_WORD)
        __builtin_memcpy(to + lane * ROWS, stored + lane, sizeof(uint32_t));
}

// sums += rows of a block times panels, `count` words of each; `next` is prefetched, `step` bytes for each word.
static inline __attribute__((always_inline)) void tile(const int tall, const int panels, const uint32_t *block,
                                                       const char *packed, long count, const char *next, long step,
                                                       vector *sums)
{
    vector sum[TALL][PANELS];
    for (int row = 0; row < tall; row++)
        for (int panel = 0; panel < panels; panel++) sum[row][panel] = sums[panel * 2 * ROWS + row];
    for (long word = 0; word < count; word++) {
        words weights[PANELS];
        for (int panel = 0; panel < panels; panel++) weights[panel] = words_at(packed + panel * sizeof(words));
        __builtin_prefetch(next);
        if (step > LINE) __builtin_prefetch(next + LINE);
        next += step;
        for (int row = 0; row < tall; row++) {
            const words factor = (words){0} + block[row];
            for (int panel = 0; panel < panels; panel++) sum[row][panel] = dot(sum[row][panel], weights[panel], factor);
        }
        packed += panels * sizeof(words);
        block += ROWS;
    }
    for (int row = 0; row < tall; row++)
        for (int panel = 0; panel < panels; panel++) sums[panel * 2 * ROWS + row] = sum[row][panel];
}

// One tile of `tall` rows.
static inline __attribute__((always_inline)) void tile_of(const int tall, long panels, const uint32_t *block,
                                                          const char *packed, long count, const char *next, long step,
                                                          vector *sums)
{
    panels > 1 ? tile(tall, 2, block, packed, count, next, step, sums)
               : tile(tall, 1, block, packed, count, next, step, sums);
}

static inline long tiles_of(long rows)
{
    return rows / ROWS * ((ROWS + TALL - 1) / TALL) + (rows % ROWS + TALL - 1) / TALL;
}

// Rows `first` to `first` + 2 * ROWS of `rows` in blocks, times one or two interleaved panels: sums[panel][row] of LANES
// outputs. Memory must never be idle, and the processor's own prefetch is late: with few rows, each part of a panel is
// multiplied with all of them while the bytes that follow it are prefetched; with more, whole panels are while the next
// ones are prefetched. Each tile prefetches its share.
static void multiply(long first, long rows, const number *blocks, const number *packed, long panels, long inputs,
                     vector sums[PANELS][2 * ROWS])
{
    const long size = inputs / PER_WORD, tiles = tiles_of(rows), wide = panels * (long)sizeof(words);
    const long part = tiles > 2 ? size : 32, ahead = tiles > 2 ? size * wide : 8192, step = wide / tiles;
    __builtin_memset(sums, 0, sizeof(vector[PANELS][2 * ROWS]));
    for (long word = 0; word < size; word += part)
        for (long row = 0, index = tiles_of(first); row < 2 * ROWS && first + row < rows; index++) {
            const uint32_t *block = (const uint32_t *)blocks + (first + row) / ROWS * ROWS * size + row % ROWS + word * ROWS;
            const long count = smaller(size - word, part), left = smaller(rows - first - row, ROWS - row % ROWS);
            const long tall = left > 4 ? TALL : left > LOW ? 4 : LOW;
            const char *weights = (const char *)packed + word * wide;
            const char *next = weights + ahead + index * count * step;
            vector *to = sums[0] + row;
            if (tall == TALL)
                tile_of(TALL, panels, block, weights, count, next, step, to);
            else if (tall == 4)
                tile_of(4, panels, block, weights, count, next, step, to);
            else
                tile_of(LOW, panels, block, weights, count, next, step, to);
            row += tall;
        }
}

#endif
