// Products of matrices of which one side is a handful of numbers: the memory of the large matrix is read or written once, and
// there is little to compute. Sums are of floats, in an order that depends on the sizes alone. The text before this defines T,
// KIND, SIDE (the narrow side), ROWS, WIDTH (numbers that are read at once), TURNED (the right matrix is stored transposed),
// BIAS and RELU.

#if KIND == 0
// out[m, SIDE] = a[m, k] · b, a block for each ROWS rows: its threads share the inner size.
extern "C" __global__ void KOLO_ENTRY(const T* a, const T* b, const T* bias, T* out, i64 m, i64 k) {
    __shared__ float parts[8][ROWS * SIDE];
    const i64 first = (i64)blockIdx.x * ROWS;
    float sums[ROWS * SIDE];
    #pragma unroll
    for (int i = 0; i < ROWS * SIDE; i++) sums[i] = 0;
    for (i64 at = (i64)threadIdx.x * WIDTH; at < k; at += blockDim.x * WIDTH) {
        Pack<T, WIDTH> left[ROWS];
        #pragma unroll
        for (int r = 0; r < ROWS; r++)
            if (first + r < m) left[r] = *(const Pack<T, WIDTH>*)(a + (first + r) * k + at);
        #pragma unroll
        for (int j = 0; j < WIDTH; j++) {
            float right[SIDE];
            #pragma unroll
            for (int c = 0; c < SIDE; c++) right[c] = widen(TURNED ? b[c * k + at + j] : b[(at + j) * SIDE + c]);
            #pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const float x = first + r < m ? widen(left[r].at[j]) : 0.0f;
                #pragma unroll
                for (int c = 0; c < SIDE; c++) sums[r * SIDE + c] += x * right[c];
            }
        }
    }
    #pragma unroll
    for (int i = 0; i < ROWS * SIDE; i++) {
        #pragma unroll
        for (int by = 16; by > 0; by /= 2) sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], by);
    }
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    #pragma unroll
    for (int i = 0; i < ROWS * SIDE; i++)
        if (lane == i % 32) parts[warp][i] = sums[i];
    __syncthreads();
    for (int i = threadIdx.x; i < ROWS * SIDE; i += blockDim.x) {
        if (first + i / SIDE >= m) continue;
        float sum = parts[0][i];
        for (int w = 1; w < warps; w++) sum += parts[w][i];
        if (BIAS) sum += widen(bias[i % SIDE]);
        if (RELU) sum = sum < 0.0f ? 0.0f : sum;
        out[first * SIDE + i] = Narrow<T>::from(sum);
    }
}
#elif KIND == 1
// out[m, SIDE] = a[k, m]ᵀ · b[k, SIDE], a block for each 32 columns of a: each of its 16 warps takes every 16th row.
extern "C" __global__ void KOLO_ENTRY(const T* a, const T* b, const T* bias, T* out, i64 m, i64 k) {
    __shared__ float parts[16][SIDE][33];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const i64 column = (i64)blockIdx.x * 32 + lane;
    const bool is_in = column < m;
    float sums[SIDE];
    #pragma unroll
    for (int c = 0; c < SIDE; c++) sums[c] = 0;
    #pragma unroll 4
    for (i64 row = warp; row < k; row += 16) {
        const float x = is_in ? widen(a[row * m + column]) : 0.0f;
        #pragma unroll
        for (int c = 0; c < SIDE; c++) sums[c] += x * widen(b[row * SIDE + c]);
    }
    #pragma unroll
    for (int c = 0; c < SIDE; c++) parts[warp][c][lane] = sums[c];
    __syncthreads();
    for (int i = threadIdx.x; i < 32 * SIDE; i += 512) {
        const int c = i % SIDE, in = i / SIDE;
        const i64 to = (i64)blockIdx.x * 32 + in;
        if (to >= m) continue;
        float sum = parts[0][c][in];
        #pragma unroll
        for (int w = 1; w < 16; w++) sum += parts[w][c][in];
        out[to * SIDE + c] = Narrow<T>::from(sum);
    }
}
#else
// out[m, n] = a[m, SIDE] · b: a thread has WIDTH columns of b, and computes them of ROWS rows.
extern "C" __global__ void KOLO_ENTRY(const T* a, const T* b, const T* bias, T* out, i64 m, i64 n) {
    const i64 column = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * WIDTH, first = (i64)blockIdx.y * ROWS;
    if (column >= n) return;
    float right[WIDTH][SIDE];
    #pragma unroll
    for (int j = 0; j < WIDTH; j++) {
        #pragma unroll
        for (int c = 0; c < SIDE; c++)
            right[j][c] = widen(TURNED ? b[(column + j) * SIDE + c] : b[c * n + column + j]);
    }
    const i64 last = first + ROWS < m ? first + ROWS : m;
    for (i64 row = first; row < last; row++) {
        float left[SIDE];
        #pragma unroll
        for (int c = 0; c < SIDE; c++) left[c] = widen(a[row * SIDE + c]);
        Pack<T, WIDTH> pack;
        #pragma unroll
        for (int j = 0; j < WIDTH; j++) {
            float sum = 0;
            #pragma unroll
            for (int c = 0; c < SIDE; c++) sum += left[c] * right[j][c];
            if (BIAS) sum += widen(bias[column + j]);
            if (RELU) sum = sum < 0.0f ? 0.0f : sum;
            pack.at[j] = Narrow<T>::from(sum);
        }
        *(Pack<T, WIDTH>*)(out + row * n + column) = pack;
    }
}
#endif
