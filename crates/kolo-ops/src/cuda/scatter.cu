// Rows combined into places named by index. The text before this defines T, I (the indices' type), JOIN(old, x).
// ORDERED: each thread walks the indices in order down its column, so that of two updates of one row the later stays.

struct Sizes { i64 at[8]; };

__device__ __forceinline__ void combine(T* place, T x) {
#if ADDS_FLOAT
    atomicAdd(place, x);
#else
    // The word around the element is exchanged until nobody came between.
    if (sizeof(T) == 8) {
        unsigned long long* at = (unsigned long long*)place;
        unsigned long long old = *at, seen;
        do {
            seen = old;
            T value;
            *(unsigned long long*)&value = seen;
            T next = Narrow<T>::from(JOIN(widen(value), widen(x)));
            old = atomicCAS(at, seen, *(unsigned long long*)&next);
        } while (old != seen);
    } else {
        const size_t address = (size_t)place;
        u32* at = (u32*)(address & ~(size_t)3);
        const u32 shift = (u32)(address & 3) * 8;
        const u32 mask = sizeof(T) >= 4 ? 0xffffffffu : ((1u << (sizeof(T) * 8 % 32)) - 1u) << shift;
        u32 old = *at, seen;
        do {
            seen = old;
            u32 bits = (seen & mask) >> shift;
            T value = *(T*)&bits;
            T next = Narrow<T>::from(JOIN(widen(value), widen(x)));
            u32 next_bits = 0;
            *(T*)&next_bits = next;
            old = atomicCAS(at, seen, (seen & ~mask) | ((next_bits << shift) & mask));
        } while (old != seen);
    }
#endif
}

// The place of update i, or -1: its coordinates are `depth` indices, with these sizes and steps.
__device__ __forceinline__ i64 row_of(const I* indices, i64 i, i64 depth, const Sizes& dims, const Sizes& steps) {
    i64 row = 0;
    for (i64 d = 0; d < depth; d++) {
        const i64 index = (i64)indices[i * depth + d];
        if (index < 0 || index >= dims.at[d]) return -1;
        row += index * steps.at[d];
    }
    return row;
}

#if ORDERED
extern "C" __global__ void KOLO_ENTRY(T* out, const I* indices, const T* updates, i64 n, i64 inner, i64 depth, i64 single,
                                      Sizes dims, Sizes steps) {
    for (i64 j = thread_number(); j < inner; j += n_threads())
        for (i64 i = 0; i < n; i++) {
            const i64 row = row_of(indices, i, depth, dims, steps);
            if (row < 0) continue;
            const T x = updates[single ? 0 : i * inner + j];
            T* place = out + row * inner + j;
            *place = Narrow<T>::from(JOIN(widen(*place), widen(x)));
        }
}
#else
extern "C" __global__ void KOLO_ENTRY(T* out, const I* indices, const T* updates, i64 n, i64 inner, i64 depth, i64 single,
                                      Sizes dims, Sizes steps) {
    for (i64 at = thread_number(); at < n * inner; at += n_threads()) {
        const i64 i = at / inner, j = at % inner;
        const i64 row = row_of(indices, i, depth, dims, steps);
        if (row >= 0) combine(out + row * inner + j, updates[single ? 0 : at]);
    }
}
#endif
