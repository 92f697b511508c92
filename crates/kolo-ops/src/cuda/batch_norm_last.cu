// Batch norm where channels come last: a thread has WIDTH neighbouring channels and walks down the rows. Sums of a channel are
// taken in parts, which are joined in order. The text before this defines T, WIDTH and KIND.

typedef Pack<T, WIDTH> P;

#if KIND == 0 || KIND == 1
// Parts of each channel's sums: of x and x² relative to the first row, so that a large mean does no harm (0); of dy and
// dy · (x - mean) (1). A block has `wide` packs of channels and 256 / wide rows at a time.
extern "C" __global__ void __launch_bounds__(256) KOLO_ENTRY(const T* x, const T* dy, const float* mean, float* first,
                                                             float* second, i64 rows, i64 channels, i64 wide) {
    __shared__ float shared[256 * WIDTH];
    const int across = (int)(threadIdx.x % wide), down = (int)(threadIdx.x / wide), tall = (int)(256 / wide);
    const i64 c = ((i64)blockIdx.x * wide + across) * WIDTH;
    float a[WIDTH], b[WIDTH], m[WIDTH];
    #pragma unroll
    for (int j = 0; j < WIDTH; j++) { a[j] = 0; b[j] = 0; m[j] = 0; }
    if (c < channels) {
#if KIND == 0
        const P base = *(const P*)(x + c);
#endif
        #pragma unroll
        for (int j = 0; j < WIDTH; j++)
#if KIND == 0
            m[j] = widen(base.at[j]);
#else
            m[j] = mean[c + j];
#endif
        #pragma unroll 4
        for (i64 row = (i64)blockIdx.y * tall + down; row < rows; row += (i64)gridDim.y * tall) {
            const P value = *(const P*)(x + row * channels + c);
#if KIND == 1
            const P grad = *(const P*)(dy + row * channels + c);
#endif
            #pragma unroll
            for (int j = 0; j < WIDTH; j++) {
                const float v = widen(value.at[j]) - m[j];
#if KIND == 0
                a[j] += v;
                b[j] += v * v;
#else
                const float g = widen(grad.at[j]);
                a[j] += g;
                b[j] += g * v;
#endif
            }
        }
    }
    for (int which = 0; which < 2; which++) {
        __syncthreads();
        #pragma unroll
        for (int j = 0; j < WIDTH; j++) shared[j * 256 + threadIdx.x] = which ? b[j] : a[j];
        __syncthreads();
        for (int half = tall / 2; half > 0; half /= 2) {
            if (down < half)
                #pragma unroll
                for (int j = 0; j < WIDTH; j++) shared[j * 256 + threadIdx.x] += shared[j * 256 + threadIdx.x + half * (int)wide];
            __syncthreads();
        }
        if (down == 0 && c < channels) {
            float* to = (which ? second : first) + (i64)blockIdx.y * channels + c;
            #pragma unroll
            for (int j = 0; j < WIDTH; j++) to[j] = shared[j * 256 + threadIdx.x];
        }
    }
}
#elif KIND == 2 || KIND == 3
// Joins the parts, 32 channels and 32 threads for each. 2: mean and variance, and what running averages should see, mixed with
// the old ones by `factor`. 3: the gradients by scale and offset.
extern "C" __global__ void KOLO_ENTRY(const float* first, const float* second, const T* x, const float* old_a,
                                      const float* old_b, float* out_a, float* out_b, float* new_a, float* new_b, i64 parts,
                                      i64 channels, float n, float factor) {
    __shared__ float shared[2][32][33];
    const i64 column = (i64)blockIdx.x * 32 + threadIdx.x;
    float a = 0, b = 0;
    if (column < channels)
        for (i64 part = threadIdx.y; part < parts; part += 32) {
            a += first[part * channels + column];
            b += second[part * channels + column];
        }
    shared[0][threadIdx.y][threadIdx.x] = a;
    shared[1][threadIdx.y][threadIdx.x] = b;
    __syncthreads();
    a = shared[0][threadIdx.x][threadIdx.y];
    b = shared[1][threadIdx.x][threadIdx.y];
    #pragma unroll
    for (int by = 16; by > 0; by /= 2) {
        a += __shfl_xor_sync(0xffffffffu, a, by);
        b += __shfl_xor_sync(0xffffffffu, b, by);
    }
    const i64 c = (i64)blockIdx.x * 32 + threadIdx.y;
    if (threadIdx.x != 0 || c >= channels) return;
#if KIND == 2
    const float shift = a / n, mean = widen(x[c]) + shift;
    float variance = b / n - shift * shift;
    variance = variance > 0.0f ? variance : 0.0f;
    out_a[c] = mean;
    out_b[c] = variance;
    const float whole = variance * (n / (n - 1.0f > 1.0f ? n - 1.0f : 1.0f));
    new_a[c] = factor == 1.0f ? mean : old_a[c] * (1.0f - factor) + mean * factor;
    new_b[c] = factor == 1.0f ? whole : old_b[c] * (1.0f - factor) + whole * factor;
#else
    // `old_a` is the variance here, and `factor` the epsilon.
    out_b[c] = a;
    out_a[c] = b / sqrtf(old_a[c] + factor);
#endif
}
#elif KIND == 4
// The normalised values. Each thread keeps its channels' factors: the grid's step is a multiple of a row.
extern "C" __global__ void __launch_bounds__(256) KOLO_ENTRY(const T* x, const float* scale, const float* offset,
                                                             const float* mean, const float* variance, T* y, i64 rows,
                                                             i64 channels, i64 wide, float epsilon) {
    const int across = (int)(threadIdx.x % wide), down = (int)(threadIdx.x / wide), tall = (int)(256 / wide);
    const i64 c = ((i64)blockIdx.x * wide + across) * WIDTH;
    if (c >= channels) return;
    float by[WIDTH], plus[WIDTH];
    #pragma unroll
    for (int j = 0; j < WIDTH; j++) {
        by[j] = scale[c + j] / sqrtf(variance[c + j] + epsilon);
        plus[j] = offset[c + j] - mean[c + j] * by[j];
    }
    // From the last row to the first: what the sums read last is still near.
    #pragma unroll 4
    for (i64 row = rows - 1 - (i64)blockIdx.y * tall - down; row >= 0; row -= (i64)gridDim.y * tall) {
        P value = *(const P*)(x + row * channels + c);
        #pragma unroll
        for (int j = 0; j < WIDTH; j++) value.at[j] = Narrow<T>::from(widen(value.at[j]) * by[j] + plus[j]);
        *(P*)(y + row * channels + c) = value;
    }
}
#elif KIND == 5
// The gradient by the values: dy · a + x · b + c for each channel. `share` is one over the elements of a channel if mean and
// variance depend on them, else 0.
extern "C" __global__ void __launch_bounds__(256) KOLO_ENTRY(const T* dy, const T* x, const float* scale, const float* mean,
                                                             const float* variance, const float* scale_grad,
                                                             const float* offset_grad, T* dx, i64 rows, i64 channels, i64 wide,
                                                             float epsilon, float share) {
    const int across = (int)(threadIdx.x % wide), down = (int)(threadIdx.x / wide), tall = (int)(256 / wide);
    const i64 c = ((i64)blockIdx.x * wide + across) * WIDTH;
    if (c >= channels) return;
    float by[WIDTH], slope[WIDTH], plus[WIDTH];
    #pragma unroll
    for (int j = 0; j < WIDTH; j++) {
        const float inverse = 1.0f / sqrtf(variance[c + j] + epsilon);
        by[j] = scale[c + j] * inverse;
        slope[j] = -by[j] * scale_grad[c + j] * inverse * share;
        plus[j] = -by[j] * offset_grad[c + j] * share - mean[c + j] * slope[j];
    }
    #pragma unroll 4
    for (i64 row = rows - 1 - (i64)blockIdx.y * tall - down; row >= 0; row -= (i64)gridDim.y * tall) {
        const P value = *(const P*)(x + row * channels + c);
        P grad = *(const P*)(dy + row * channels + c);
        #pragma unroll
        for (int j = 0; j < WIDTH; j++)
            grad.at[j] = Narrow<T>::from(widen(grad.at[j]) * by[j] + widen(value.at[j]) * slope[j] + plus[j]);
        *(P*)(dx + row * channels + c) = grad;
    }
}
#endif
