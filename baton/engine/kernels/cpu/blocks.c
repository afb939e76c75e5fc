/* KV between the blocks of a cache and its wire order: one call for all layers of a frame. */

typedef struct {
    char **planes;         /* per tensor: block 0 of layer 0 */
    const int64_t *blocks; /* those that hold [begin, end), in their order */
    char *wire;
    long tensors, layers, layer_bytes, block_size, token_bytes, begin, end, write;
} blocks_args;

#define STRIDE 256 /* bytes copied between two prefetches of as many */

INLINE void ahead(const char *p) {
    for (long i = 0; i < STRIDE; i += 64)
        __builtin_prefetch(p + i, 0, 0);
}

/* Blocks lie anywhere, so no hardware prefetcher knows the next one: this asks for it while it copies. */
INLINE void read_run(const char *from, char *to, long bytes, const char *next) {
    long i = 0;
    for (; i + STRIDE <= bytes; i += STRIDE) {
        ahead(next + i);
        memcpy(to + i, from + i, STRIDE);
    }
    memcpy(to + i, from + i, bytes - i);
}

/* Past the caches: nobody reads it at once, and what is written as a whole need not be read first. */
INLINE void write_run(const char *from, char *to, long bytes) {
    if (((uintptr_t)to | bytes) % 64) {
        memcpy(to, from, bytes);
        return;
    }
    for (long i = 0; i < bytes; i += 64)
        _mm512_stream_si512((void *)(to + i), _mm512_loadu_si512(from + i));
}

INLINE void plane(const blocks_args *a, char *cache, char *wire) {
    const long first = a->begin / a->block_size, block_bytes = a->block_size * a->token_bytes;
    for (long at = a->begin; at < a->end;) {
        const long i = at / a->block_size, left = (i + 1) * a->block_size - at;
        const long run = left < a->end - at ? left : a->end - at;
        char *here = cache + a->blocks[i - first] * block_bytes + at % a->block_size * a->token_bytes;
        char *there = wire + (at - a->begin) * a->token_bytes;
        at += run;
        if (a->write)
            write_run(there, here, run * a->token_bytes);
        else
            read_run(here, there, run * a->token_bytes,
                     at < a->end ? cache + a->blocks[i + 1 - first] * block_bytes : here);
    }
}

void NAME(blocks)(const blocks_args *a) {
    const long bytes = (a->end - a->begin) * a->token_bytes;
    for (long l = 0; l < a->layers; l++)
        for (long t = 0; t < a->tensors; t++)
            plane(a, a->planes[t] + l * a->layer_bytes, a->wire + (l * a->tensors + t) * bytes);
    _mm_sfence();
}
