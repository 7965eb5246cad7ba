// Products of a few rows with a packed weight, in bf16: by AMX if the processor has it, else by AVX512-BF16.
//
// A weight [outputs, inputs] is packed as panels of LANES outputs: pair by pair of inputs, two numbers of each output.
// The other factor is spread: blocks of ROWS rows, in the order of the instructions.

#include "bf16.h"

enum { ROWS = 16 }; // of a block

#ifdef __AMX_BF16__

#include <sys/syscall.h>
#include <unistd.h>

// A tile has sixteen rows of 64 bytes: 16 pairs of inputs of a panel, or 32 inputs of 16 rows of a block.
enum { TILE = 32, PANELS = 2 }; // PANELS: panels per block before the next block

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

static inline void spread(bf16 *block, long row, long input, __m512 numbers) // LANES numbers of one row, from `input`
{
    store(block + input / TILE * TILE * ROWS + row * TILE + input % TILE, numbers);
}

// One or two blocks of `rows`, times a panel and another unless NULL: LANES outputs of each row.
// Tiles: 0 to 3 are sums, 4 and 5 blocks, 6 and 7 panels. Several sums at a time, because an addition waits for the
// previous one and each loaded tile is used twice.
static void multiply(long rows, const bf16 *blocks, const bf16 *panel, const bf16 *other, long inputs,
                     __m512 sums[2][2 * ROWS])
{
    const int both = rows > ROWS;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long input = 0; input < inputs; input += TILE) {
        _tile_loadd(4, blocks + input * ROWS, 64);
        _tile_loadd(6, panel + input * LANES, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (both) {
            _tile_loadd(5, blocks + (inputs + input) * ROWS, 64);
            _tile_dpbf16ps(1, 5, 6);
        }
        if (other) {
            _tile_loadd(7, other + input * LANES, 64);
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

enum {
    PANELS = 3,  // panels per block before the next block
    AHEAD = 8192 // bytes to prefetch weights, because the processor's own prefetch is late (1.4 times as slow)
};

int amx(void) { return 0; }

static inline void begin_products(void) {}

static inline void end_products(void) {}

// A block is spread pair by pair of inputs, two numbers of each row.
static inline void spread(bf16 *block, long row, long input, __m512 numbers) // LANES numbers of one row, from `input`
{
    const __m256i pairs = _mm256_set_epi32(7 * ROWS, 6 * ROWS, 5 * ROWS, 4 * ROWS, 3 * ROWS, 2 * ROWS, ROWS, 0);
    _mm256_i32scatter_epi32((int *)block + input / 2 * ROWS + row, pairs, narrowed(numbers), 4);
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

// One or two blocks of `rows`, times a panel and another unless NULL: LANES outputs of each row.
static void multiply(long rows, const bf16 *blocks, const bf16 *panel, const bf16 *other, long inputs,
                     __m512 sums[2][2 * ROWS])
{
    for (int side = 0; side < (other ? 2 : 1); side++)
        for (long first = 0; first < rows; first += ROWS) {
            const long rest = rows - first;
            (rest <= 4 ? multiply_4 : rest <= 8 ? multiply_8 : rest <= 12 ? multiply_12 : multiply_16)(
                blocks + first * inputs, side ? other : panel, inputs / 2, sums[side] + first);
        }
}

#endif
