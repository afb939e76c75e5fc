/* Copies of KV between the blocks of a cache and wire order, or two caches: one call for all layers of a frame. */

typedef struct {
    char **planes;         /* block 0 of layer 0 of each tensor */
    const int64_t *blocks; /* blocks of positions [begin, end), in order */
    char *wire;
    long tensors, layers, layer_bytes, block_size, token_bytes, begin, end, write;
} blocks_args;

#define STRIDE 256 /* bytes copied per prefetch of as many bytes */

INLINE void ahead(const char *p) {
    for (long i = 0; i < STRIDE; i += 64)
        __builtin_prefetch(p + i, 0, 0);
}

/* Blocks have arbitrary places that hardware cannot predict, so the copy prefetches the next block. */
INLINE void read_run(const char *from, char *to, long bytes, const char *next) {
    long i = 0;
    for (; i + STRIDE <= bytes; i += STRIDE) {
        ahead(next + i);
        memcpy(to + i, from + i, STRIDE);
    }
    memcpy(to + i, from + i, bytes - i);
}

INLINE void stream_line(const char *from, char *to) {
    for (long i = 0; i < 64; i += sizeof(VI))
        vi_stream(to + i, vi_load(from + i));
}

/* Bypasses the caches, because the data is not read soon and whole lines need not be read before the write. */
INLINE void write_run(const char *from, char *to, long bytes) {
    if (((uintptr_t)to | bytes) % 64) {
        memcpy(to, from, bytes);
        return;
    }
    for (long i = 0; i < bytes; i += 64)
        stream_line(from + i, to + i);
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
    streams_done();
}

typedef struct {
    char **from, **to; /* block 0 of the first layer of each tensor */
    const int64_t *theirs, *ours; /* blocks of positions [begin, end), in order */
    long tensors, layers, from_layer, to_layer, from_size, to_size, token_bytes, begin, end;
} between_args;

#define PAGE 4096
#define FIRST 512 /* bytes of a page after which the hardware prefetcher has found the stream */

/* Copies both halves of a run in turn, line by line, and prefetches the first bytes of each page of the next run. One
 * stream does not keep enough loads under way, and no hardware prefetch crosses a page (docs/measurements/transfer.md).
 */
INLINE void copy_run(const char *from, char *to, long bytes, const char *next) {
    for (long page = 0; page < bytes; page += PAGE)
        for (long i = page; i < page + FIRST && i < bytes; i += 64)
            __builtin_prefetch(next + i, 0, 3);
    const long half = bytes / 2;
    if ((uintptr_t)to % 64 || bytes % 128)
        return write_run(from, to, bytes);
    for (long i = 0; i < half; i += 64) {
        stream_line(from + i, to + i);
        stream_line(from + half + i, to + half + i);
    }
}

/* The place in a plane of position `at` of a sequence, in positions. `begin` is in the first of `blocks`. */
INLINE long position(const int64_t *blocks, long size, long begin, long at) {
    return blocks[at / size - begin / size] * size + at % size;
}

/* Copies one plane between caches of different block sizes: each run ends where a block of either side ends. */
INLINE void plane_between(const between_args *a, const char *from, char *to) {
    for (long at = a->begin; at < a->end;) {
        const long left = a->from_size - at % a->from_size, room = a->to_size - at % a->to_size;
        long run = left < room ? left : room;
        run = run < a->end - at ? run : a->end - at;
        const char *source = from + position(a->theirs, a->from_size, a->begin, at) * a->token_bytes, *next = source;
        char *place = to + position(a->ours, a->to_size, a->begin, at) * a->token_bytes;
        at += run;
        if (at < a->end)
            next = from + position(a->theirs, a->from_size, a->begin, at) * a->token_bytes;
        copy_run(source, place, run * a->token_bytes, next);
    }
}

void NAME(between)(const between_args *a) {
    for (long l = 0; l < a->layers; l++)
        for (long t = 0; t < a->tensors; t++)
            plane_between(a, a->from[t] + l * a->from_layer, a->to[t] + l * a->to_layer);
    streams_done();
}
