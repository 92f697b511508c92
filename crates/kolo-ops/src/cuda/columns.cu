// Reduces a matrix down its columns. A block has ACROSS threads side by side, each with PER neighbouring columns, and as many
// rows of them as fit; blocks one below the other take parts of the rows, and the last one to end joins what all have left, in
// the order of the parts: which block that is makes no difference. The text before this defines what reduce.cu needs too, and,
// if MAPS, the kernel's own arguments and `element`, whose value is stored as well as reduced.

#define DOWN (256 / ACROSS)

// How many parts of a strip of columns are done; zero again when a launch ends. Launches of one kernel follow each other.
__device__ u32 n_done[MOST_STRIPS];

__device__ __forceinline__ void join_down(A (&acc)[PER], A* all, int across, int down) {
    __syncthreads();
    #pragma unroll
    for (int j = 0; j < PER; j++) all[threadIdx.x * PER + j] = acc[j];
    for (int half = DOWN / 2; half > 0; half /= 2) {
        __syncthreads();
        if (down < half)
            #pragma unroll
            for (int j = 0; j < PER; j++) {
                A a = all[threadIdx.x * PER + j], b = all[(threadIdx.x + half * ACROSS) * PER + j];
                all[threadIdx.x * PER + j] = JOIN(a, b);
            }
    }
    __syncthreads();
    #pragma unroll
    for (int j = 0; j < PER; j++) acc[j] = all[across * PER + j];
}

extern "C" __global__ void __launch_bounds__(256) KOLO_ENTRY(ARGUMENTS A* partial, U* out, i64 rows, i64 columns, i64 n_parts) {
    __shared__ A all[256 * PER];
    __shared__ bool is_last;
    const int across = threadIdx.x % ACROSS, down = threadIdx.x / ACROSS;
    const i64 column = ((i64)blockIdx.x * ACROSS + across) * PER;
    const i64 from = rows * blockIdx.y / n_parts, to = rows * (blockIdx.y + 1) / n_parts;
    A acc[PER];
    #pragma unroll
    for (int j = 0; j < PER; j++) acc[j] = START;
    if (column < columns) {
        #pragma unroll 4
        for (i64 r = from + down; r < to; r += DOWN) {
            const i64 i = (r * columns + column) / PER;
#if MAPS
            MAP_ROW
#else
            const Pack<T, PER> value = ((const Pack<T, PER>*)in)[i];
#endif
            #pragma unroll
            for (int j = 0; j < PER; j++) acc[j] = STEP(acc[j], widen(value.at[j]));
        }
    }
    join_down(acc, all, across, down);
    const bool writes = down == 0 && column < columns;
    if (n_parts == 1) {
        if (writes)
            for (int j = 0; j < PER; j++) out[column + j] = Narrow<U>::from(FINISH(acc[j], rows));
        return;
    }
    if (writes)
        for (int j = 0; j < PER; j++) partial[blockIdx.y * columns + column + j] = acc[j];
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(&n_done[blockIdx.x], 1u) == (u32)n_parts - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    #pragma unroll
    for (int j = 0; j < PER; j++) acc[j] = START;
    if (column < columns)
        for (i64 part = down; part < n_parts; part += DOWN)
            #pragma unroll
            for (int j = 0; j < PER; j++) {
                A other = ((volatile A*)partial)[part * columns + column + j];
                acc[j] = JOIN(acc[j], other);
            }
    join_down(acc, all, across, down);
    if (writes)
        for (int j = 0; j < PER; j++) out[column + j] = Narrow<U>::from(FINISH(acc[j], rows));
    if (threadIdx.x == 0) n_done[blockIdx.x] = 0;
}
