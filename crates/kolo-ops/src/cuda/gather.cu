// Rows picked by index, and rows added to places named by index. An index that is out of range reads zeros and writes
// nothing.

__device__ __forceinline__ void memset_zero(E* x) {
    for (int i = 0; i < (int)sizeof(E); i++) ((u8*)x)[i] = 0;
}

#if KIND == 0
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
#elif KIND == 1
// out[i, j] = in[place of indices[i, ...], j]
struct Sizes { i64 at[8]; };
extern "C" __global__ void KOLO_ENTRY(const E* in, const I* indices, E* out, i64 n, i64 inner, i64 depth, Sizes dims,
                                      Sizes steps) {
    for (i64 at = thread_number(); at < n; at += n_threads()) {
        const i64 j = at % inner, i = at / inner;
        i64 from = 0;
        bool is_bad = false;
        for (i64 d = 0; d < depth; d++) {
            const i64 index = (i64)indices[i * depth + d];
            is_bad |= index < 0 || index >= dims.at[d];
            from += index * steps.at[d];
        }
        if (is_bad) { E zero; memset_zero(&zero); out[at] = zero; }
        else out[at] = in[from * inner + j];
    }
}
#endif
