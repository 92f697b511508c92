// Slices picked by coordinates. An index that is out of range reads zeros.

__device__ __forceinline__ void memset_zero(E* x) {
    for (int i = 0; i < (int)sizeof(E); i++) ((u8*)x)[i] = 0;
}

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
