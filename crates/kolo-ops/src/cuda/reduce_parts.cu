// Joins the parts of a reduction, always in the same order: a thread, or a warp, for each output element.
#if BY_WARP
__device__ __forceinline__ A shuffle_down(A x, int by) {
    if (sizeof(A) == 8) {
        u64 bits = *(u64*)&x;
        bits = __shfl_down_sync(0xffffffffu, bits, by);
        return *(A*)&bits;
    }
    u32 bits = 0;
    *(A*)&bits = x;
    bits = __shfl_down_sync(0xffffffffu, bits, by);
    return *(A*)&bits;
}

extern "C" __global__ void KOLO_ENTRY(const A* partial, U* out, i64 n_out, i64 n_parts, i64 n_in) {
    const i64 which = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (which >= n_out) return;
    A acc = START;
    for (i64 part = threadIdx.x % 32; part < n_parts; part += 32) {
        A other = partial[part * n_out + which];
        acc = JOIN(acc, other);
    }
    for (int by = 16; by > 0; by /= 2) { A other = shuffle_down(acc, by); acc = JOIN(acc, other); }
    if (threadIdx.x % 32 == 0) out[which] = Narrow<U>::from(FINISH(acc, n_in));
}
#else
extern "C" __global__ void KOLO_ENTRY(const A* partial, U* out, i64 n_out, i64 n_parts, i64 n_in) {
    for (i64 which = thread_number(); which < n_out; which += n_threads()) {
        A acc = START;
        for (i64 part = 0; part < n_parts; part++) { A other = partial[part * n_out + which]; acc = JOIN(acc, other); }
        out[which] = Narrow<U>::from(FINISH(acc, n_in));
    }
}
#endif
