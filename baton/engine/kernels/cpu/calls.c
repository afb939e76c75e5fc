/* Calls as data, so that one call from Python makes those of all layers. */
typedef struct {
    const void *args;
    void *scratch;        /* of products, or NULL */
    int kind, activation; /* `activation` is for gemm */
} call_t;

enum { NORM, ROTATE_AND_STORE, GATE, LINEAR, GEMM, QUANTIZE, QUANTIZED, ATTENTION };

static long make_call(const call_t *call, int threads) {
    switch (call->kind) {
    case NORM: NAME(norm)(call->args, threads); break;
    case ROTATE_AND_STORE: NAME(rotate_and_store)(call->args, threads); break;
    case GATE: NAME(gate)(call->args, threads); break;
    case LINEAR: NAME(linear)(call->args, call->scratch, threads); break;
    case GEMM: NAME(gemm)(call->args, call->scratch, threads, call->activation); break;
    case QUANTIZE: NAME(quantize)(call->args, threads); break;
    case QUANTIZED: NAME(quantized)(call->args, threads); break;
    case ATTENTION: return NAME(attention)(call->args, threads);
    }
    return 0;
}

/* Makes the calls in their order, and returns the sum of the results of attention. */
long NAME(calls)(const call_t *calls, long count, int threads) {
    long recomputed = 0;
    for (long i = 0; i < count; i++) recomputed += make_call(calls + i, threads);
    return recomputed;
}
