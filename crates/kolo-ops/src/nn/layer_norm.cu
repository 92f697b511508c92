// Layer norm of rows that a warp can hold: PACKS times WIDTH numbers in each lane, read once. The text before this defines T,
// WIDTH, PACKS and KIND.

#define EACH(i, j) _Pragma("unroll") for (int i = 0; i < PACKS; i++) _Pragma("unroll") for (int j = 0; j < WIDTH; j++)

typedef Pack<T, WIDTH> P;

__device__ __forceinline__ float all_lanes(float x) {
    #pragma unroll
    for (int by = 16; by > 0; by /= 2) x += __shfl_xor_sync(0xffffffffu, x, by);
    return x;
}

// A row of n numbers; what is beyond it is zero.
__device__ __forceinline__ void load(float (&to)[PACKS][WIDTH], const T* row, int n) {
    #pragma unroll
    for (int i = 0; i < PACKS; i++) {
        const int at = (i * 32 + threadIdx.x % 32) * WIDTH;
        P pack;
        if (at < n) pack = *(const P*)(row + at);
        #pragma unroll
        for (int j = 0; j < WIDTH; j++) to[i][j] = at < n ? widen(pack.at[j]) : 0.0f;
    }
}

__device__ __forceinline__ void save(T* row, const float (&from)[PACKS][WIDTH], int n) {
    #pragma unroll
    for (int i = 0; i < PACKS; i++) {
        const int at = (i * 32 + threadIdx.x % 32) * WIDTH;
        P pack;
        #pragma unroll
        for (int j = 0; j < WIDTH; j++) pack.at[j] = Narrow<T>::from(from[i][j]);
        if (at < n) *(P*)(row + at) = pack;
    }
}

// Makes a row's mean zero and its variance one; returns one over its deviation.
__device__ __forceinline__ float normalise(float (&x)[PACKS][WIDTH], int n, float epsilon) {
    float sum = 0, squares = 0;
    EACH(i, j) sum += x[i][j];
    const float mean = all_lanes(sum) / (float)n;
    EACH(i, j) {
        // What is beyond the row stays zero.
        x[i][j] = (i * 32 + (int)threadIdx.x % 32) * WIDTH < n ? x[i][j] - mean : 0.0f;
        squares += x[i][j] * x[i][j];
    }
    const float rstd = 1.0f / sqrtf(all_lanes(squares) / (float)n + epsilon);
    EACH(i, j) x[i][j] *= rstd;
    return rstd;
}

#if KIND == 0
extern "C" __global__ void __launch_bounds__(256) KOLO_ENTRY(const T* in, const T* scale, const T* offset, T* out, i64 rows,
                                                             i64 long_n, float epsilon) {
    const int n = (int)long_n;
    float s[PACKS][WIDTH], o[PACKS][WIDTH], x[PACKS][WIDTH];
    load(s, scale, n);
    load(o, offset, n);
    for (i64 row = thread_number() / 32; row < rows; row += n_threads() / 32) {
        load(x, in + row * n, n);
        normalise(x, n, epsilon);
        EACH(i, j) x[i][j] = x[i][j] * s[i][j] + o[i][j];
        save(out + row * n, x, n);
    }
}
#elif KIND == 1
// The gradient of the rows, and each block's part of the sums for scale and offset. What is at `plus`, if anything, is added to
// the gradient.
extern "C" __global__ void __launch_bounds__(256) KOLO_ENTRY(const T* grad, const T* in, const T* scale, const T* plus, T* out,
                                                             float* dscale, float* doffset, i64 rows, i64 long_n,
                                                             float epsilon) {
    __shared__ float shared[PACKS * 32 * WIDTH];
    const int n = (int)long_n;
    float s[PACKS][WIDTH], ds[PACKS][WIDTH], doff[PACKS][WIDTH], x[PACKS][WIDTH], g[PACKS][WIDTH];
    load(s, scale, n);
    EACH(i, j) { ds[i][j] = 0; doff[i][j] = 0; }
    for (i64 row = thread_number() / 32; row < rows; row += n_threads() / 32) {
        load(x, in + row * n, n);
        load(g, grad + row * n, n);
        const float rstd = normalise(x, n, epsilon);
        float a = 0, b = 0;
        EACH(i, j) {
            doff[i][j] += g[i][j];
            ds[i][j] += g[i][j] * x[i][j];
            g[i][j] *= s[i][j];
            a += g[i][j];
            b += g[i][j] * x[i][j];
        }
        a = all_lanes(a) / (float)n;
        b = all_lanes(b) / (float)n;
        EACH(i, j) g[i][j] = (g[i][j] - a - x[i][j] * b) * rstd;
        if (plus) {
            load(x, plus + row * n, n);
            // Rounded in between, as by two kernels.
            EACH(i, j) g[i][j] = widen(Narrow<T>::from(g[i][j])) + x[i][j];
        }
        save(out + row * n, g, n);
    }
    // The warps add up one after the other, so that the order is the same each time.
    for (int which = 0; which < 2; which++) {
        for (int w = 0; w < (int)blockDim.x / 32; w++) {
            __syncthreads();
            if ((int)threadIdx.x / 32 == w)
                EACH(i, j) {
                    const int at = (i * 32 + threadIdx.x % 32) * WIDTH + j;
                    const float mine = which ? doff[i][j] : ds[i][j];
                    shared[at] = w ? shared[at] + mine : mine;
                }
        }
        __syncthreads();
        float* to = (which ? doffset : dscale) + (i64)blockIdx.x * n;
        for (int at = threadIdx.x; at < n; at += blockDim.x) to[at] = shared[at];
    }
}
#elif KIND == 2
// Sums down the columns of two matrices of parts: blocks of 32 columns by 32 threads.
extern "C" __global__ void KOLO_ENTRY(const float* first, const float* second, T* first_out, T* second_out, i64 parts, i64 n) {
    __shared__ float shared[32][33];
    const float* from = blockIdx.y ? second : first;
    const i64 column = (i64)blockIdx.x * 32 + threadIdx.x;
    float sum = 0;
    if (column < n)
        for (i64 part = threadIdx.y; part < parts; part += 32) sum += from[part * n + column];
    shared[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    // Turned, so that a warp adds up one column.
    sum = shared[threadIdx.x][threadIdx.y];
    #pragma unroll
    for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, by);
    const i64 mine = (i64)blockIdx.x * 32 + threadIdx.y;
    if (threadIdx.x == 0 && mine < n) (blockIdx.y ? second_out : first_out)[mine] = Narrow<T>::from(sum);
}
#endif
