/* Read memory as fast as one core can: the limit of everything that has to stream weights.
 * STREAMS parts are read side by side, since one core keeps more requests for memory in flight when it follows several. */
#include <stddef.h>
#include <stdint.h>

typedef uint64_t vector __attribute__((vector_size(64)));

#define READ(name, STREAMS)                                                        \
    uint64_t name(const uint64_t *data, size_t words, int passes) {                \
        const vector *from = (const vector *)data;                                 \
        size_t part = words / (8 * STREAMS);                                       \
        vector sum[STREAMS] = {{0}};                                               \
        for (int pass = 0; pass < passes; pass++) {                                \
            for (size_t i = 0; i < part; i++)                                      \
                for (int s = 0; s < STREAMS; s++) sum[s] += from[s * part + i];    \
            __asm__ volatile("" ::: "memory");                                     \
        }                                                                          \
        vector total = {0};                                                        \
        for (int s = 0; s < STREAMS; s++) total += sum[s];                         \
        uint64_t result = 0;                                                       \
        for (int lane = 0; lane < 8; lane++) result += total[lane];                \
        return result;                                                             \
    }

READ(read_1, 1)
READ(read_4, 4)
READ(read_8, 8)
