// Rows picked by index along an axis. An index that is out of range reads zeros.

__device__ __forceinline__ void memset_zero(E* x) {
    for (int i = 0; i < (int)sizeof(E); i++) ((u8*)x)[i] = 0;
}

// out[o, i, j] = in[o, indices[b, i], j]: o runs over the batch and what comes before the axis.
extern "C" __global__ void KOLO_ENTRY(const E* in, const I* indices, E* out, i64 n, i64 n_axis, i64 n_indices, i64 inner,
                                      i64 outer_per_batch) {
    for (i64 at = thread_number(); at < n; at += n_threads()) {
        const i64 j = at % inner, row = at / inner, i = row % n_indices, o = row / n_indices;
        const i64 index = (i64)indices[(o / outer_per_batch) * n_indices * (outer_per_batch > 0 && BATCHED) + i];
        if (index < 0 || index >= n_axis) { E zero; memset_zero(&zero); out[at] = zero; }
        else out[at] = in[(o * n_axis + index) * inner + j];
    }
}
