// Reductions over any axes. The text before this defines T, U (the output), A (what is accumulated), START, STEP(acc, x),
// JOIN(a, b), FINISH(acc, n), and the rank of either side. An output element's index gives where its values begin; the
// index along what is reduced gives where the next one is.

struct Sizes { i64 at[8]; };

__device__ __forceinline__ i64 place(i64 index, const Sizes& sizes, const Sizes& steps, int rank) {
    i64 at = 0;
    for (int d = rank - 1; d >= 0; d--) {
        at += (index % sizes.at[d]) * steps.at[d];
        index /= sizes.at[d];
    }
    return at;
}

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

#if BY_ROW
// A block (or, if FEW, a warp) for each output element and each part of what is reduced: neighbours are reduced together.
extern "C" __global__ void KOLO_ENTRY(const T* in, A* partial, U* out, i64 n_out, i64 n_in, i64 n_parts,
                                      Sizes kept, Sizes kept_steps, Sizes reduced, Sizes reduced_steps) {
    const int lanes = FEW ? 32 : blockDim.x;
    const int group = FEW ? threadIdx.x / 32 : 0;
    const int lane = FEW ? threadIdx.x % 32 : threadIdx.x;
    const i64 job = (i64)blockIdx.x * (FEW ? blockDim.x / 32 : 1) + group;
    if (FEW && job >= n_out * n_parts) return;
    const i64 which = job % n_out, part = job / n_out;
    const i64 from = n_in * part / n_parts, to = n_in * (part + 1) / n_parts;
    const i64 base = place(which, kept, kept_steps, KEPT_RANK);
    A acc = START;
    if (REDUCED_RANK == 1) {
        const i64 step = reduced_steps.at[0];
        for (i64 i = from + lane; i < to; i += lanes) acc = STEP(acc, widen(in[base + i * step]));
    } else {
        for (i64 i = from + lane; i < to; i += lanes)
            acc = STEP(acc, widen(in[base + place(i, reduced, reduced_steps, REDUCED_RANK)]));
    }
    for (int by = 16; by > 0; by /= 2) { A other = shuffle_down(acc, by); acc = JOIN(acc, other); }
    if (!FEW) {
        __shared__ A warps[32];
        if (lane % 32 == 0) warps[lane / 32] = acc;
        __syncthreads();
        if (lane < 32) {
            acc = lane < lanes / 32 ? warps[lane] : START;
            for (int by = 16; by > 0; by /= 2) { A other = shuffle_down(acc, by); acc = JOIN(acc, other); }
        }
    }
    if (lane == 0) {
        if (n_parts == 1) out[which] = Narrow<U>::from(FINISH(acc, n_in));
        else partial[part * n_out + which] = acc;
    }
}
#else
// A thread for each output element and each part: neighbours are outputs.
extern "C" __global__ void KOLO_ENTRY(const T* in, A* partial, U* out, i64 n_out, i64 n_in, i64 n_parts,
                                      Sizes kept, Sizes kept_steps, Sizes reduced, Sizes reduced_steps) {
    for (i64 job = thread_number(); job < n_out * n_parts; job += n_threads()) {
        const i64 which = job % n_out, part = job / n_out;
        const i64 from = n_in * part / n_parts, to = n_in * (part + 1) / n_parts;
        const i64 base = place(which, kept, kept_steps, KEPT_RANK);
        A acc = START;
        if (REDUCED_RANK == 1) {
            const T* at = in + base + from * reduced_steps.at[0];
            const i64 step = reduced_steps.at[0];
            #pragma unroll 4
            for (i64 i = from; i < to; i++, at += step) acc = STEP(acc, widen(*at));
        } else {
            for (i64 i = from; i < to; i++)
                acc = STEP(acc, widen(in[base + place(i, reduced, reduced_steps, REDUCED_RANK)]));
        }
        if (n_parts == 1) out[which] = Narrow<U>::from(FINISH(acc, n_in));
        else partial[part * n_out + which] = acc;
    }
}
#endif
