// What kernels over rows of the last dimension share. There is a block for each row.

#define LOWEST (sizeof(W) == 8 ? (W)__longlong_as_double((i64)0xffefffffffffffffull) : (W)-3.402823466e38f)

__device__ __forceinline__ W shuffle_xor(W x, int by) {
    return __shfl_xor_sync(0xffffffffu, x, by);
}

// The sum (or maximum) over all threads of the block, for each of them.
__device__ __forceinline__ W all_sum(W x, W* shared) {
    for (int by = 16; by > 0; by /= 2) x += shuffle_xor(x, by);
    if (blockDim.x == 32) return x;
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
    __syncthreads();
    x = threadIdx.x % 32 < blockDim.x / 32 ? shared[threadIdx.x % 32] : (W)0;
    for (int by = 16; by > 0; by /= 2) x += shuffle_xor(x, by);
    return x;
}

__device__ __forceinline__ W all_max(W x, W* shared) {
    for (int by = 16; by > 0; by /= 2) { W y = shuffle_xor(x, by); x = y > x ? y : x; }
    if (blockDim.x == 32) return x;
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
    __syncthreads();
    x = threadIdx.x % 32 < blockDim.x / 32 ? shared[threadIdx.x % 32] : LOWEST;
    for (int by = 16; by > 0; by /= 2) { W y = shuffle_xor(x, by); x = y > x ? y : x; }
    return x;
}
