/* Serves calls of the kernels over stdin and stdout, for tests under an emulator: tests/support/emulated.py. */
#include "kernels.c"

#include <stdio.h>
#include <stdlib.h>

typedef int64_t (*function)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                            int64_t, int64_t, int64_t);
#define ENTRY(f) {#f, (void *)NAME(f)}
static const struct { const char *name; void *run; } FUNCTIONS[] = {
    ENTRY(linear), ENTRY(linear_scratch), ENTRY(gemm), ENTRY(gemm_scratch), ENTRY(norm), ENTRY(gate), ENTRY(draw), ENTRY(draw_scratch),
    ENTRY(rotate_and_store), ENTRY(attention), ENTRY(attention_plan), ENTRY(attention_workspace), ENTRY(quantize),
    ENTRY(quantized), ENTRY(blocks), ENTRY(between),
};

static void take(void *to, size_t bytes) {
    if (bytes && fread(to, 1, bytes, stdin) != bytes) exit(0);
}

static int64_t number(void) {
    int64_t n;
    take(&n, sizeof n);
    return n;
}

static void serve(void) {
    char name[32];
    int64_t sizes[64], args[13] = {0};
    char *buffers[64];
    take(name, sizeof name);
    const long count = number();
    for (long i = 0; i < count; i++) {
        sizes[i] = number();
        buffers[i] = aligned_alloc(64, (sizes[i] + 127) / 64 * 64);
        take(buffers[i], sizes[i]);
    }
    for (long left = number(); left; left--) { /* pointers in a structure */
        const int64_t in = number(), at = number(), of = number(), offset = number();
        char *pointer = buffers[of] + offset;
        memcpy(buffers[in] + at, &pointer, sizeof pointer);
    }
    const long given = number();
    for (long i = 0; i < given; i++) {
        const int64_t of = number(), value = number();
        args[i] = of < 0 ? value : (int64_t)(buffers[of] + value);
    }
    for (size_t i = 0; i < sizeof FUNCTIONS / sizeof *FUNCTIONS; i++)
        if (!strcmp(name, FUNCTIONS[i].name)) {
            const int64_t *a = args, result = ((function)FUNCTIONS[i].run)(a[0], a[1], a[2], a[3], a[4], a[5], a[6],
                                                                           a[7], a[8], a[9], a[10], a[11], a[12]);
            fwrite(&result, sizeof result, 1, stdout);
        }
    for (long i = 0; i < count; i++) {
        fwrite(buffers[i], 1, sizes[i], stdout);
        free(buffers[i]);
    }
    fflush(stdout);
}

int main(void) {
    for (;;) serve();
}
