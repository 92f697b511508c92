// Batch norm where channels come before the pixels of a plane, [outer, channels, inner]: a thread reads WIDTH neighbouring pixels
// at once. Sums of a channel are taken in parts, which are joined in order. The text before this defines T, WIDTH and KIND.

typedef Pack<T, WIDTH> P;

#if KIND == 0 || KIND == 1
// Parts of each channel's sums: of x and x² relative to the channel's first value, so that a large mean does no harm (0); of dy
// and dy · (x - mean) (1). Block (c, p) has part p of channel c. There are fewer than 2³¹ loads in a channel.
extern "C" __global__ void __launch_bounds__(256) KOLO_ENTRY(const T* x, const T* dy, const float* mean, float* first,
                                                             float* second, i64 outer, i64 channels, i64 inner) {
    __shared__ float parts[2][8];
    const u32 packs = (u32)(inner / WIDTH), n = (u32)outer * packs, step = 256 * gridDim.y;
    const i64 c = blockIdx.x;
#if KIND == 0
    const float m = widen(x[c * inner]);
#else
    const float m = mean[c];
#endif
    float a = 0, b = 0;
    #pragma unroll 4
    for (u32 i = blockIdx.y * 256 + threadIdx.x; i < n; i += step) {
        const u32 image = i / packs;
        const i64 at = ((i64)image * channels + c) * inner + (i64)(i - image * packs) * WIDTH;
        const P value = *(const P*)(x + at);
#if KIND == 1
        const P grad = *(const P*)(dy + at);
#endif
        #pragma unroll
        for (int j = 0; j < WIDTH; j++) {
            const float v = widen(value.at[j]) - m;
#if KIND == 0
            a += v;
            b += v * v;
#else
            const float g = widen(grad.at[j]);
            a += g;
            b += g * v;
#endif
        }
    }
    #pragma unroll
    for (int by = 16; by > 0; by /= 2) {
        a += __shfl_xor_sync(0xffffffffu, a, by);
        b += __shfl_xor_sync(0xffffffffu, b, by);
    }
    if (threadIdx.x % 32 == 0) { parts[0][threadIdx.x / 32] = a; parts[1][threadIdx.x / 32] = b; }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < 8; w++) { a += parts[0][w]; b += parts[1][w]; }
        first[(i64)blockIdx.y * channels + c] = a;
        second[(i64)blockIdx.y * channels + c] = b;
    }
}
#elif KIND == 2 || KIND == 3
// Joins the parts, a warp for each channel. 2: mean and variance, what running averages should see, mixed with the old ones by
// `factor`, and what values are multiplied by and have added. 3: the gradients by scale and offset, and what dy and x are
// multiplied by and have added. `table` has these, a row for each.
extern "C" __global__ void KOLO_ENTRY(const float* first, const float* second, const T* x, const float* scale,
                                      const float* offset, const float* in_a, const float* in_b, float* out_a, float* out_b,
                                      float* new_a, float* new_b, float* zero, float* table, i64 parts, i64 channels, i64 inner,
                                      float n, float factor, float epsilon, float share) {
    const i64 c = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    const int lane = threadIdx.x % 32;
    if (c >= channels) return;
    float a = 0, b = 0;
    for (i64 part = lane; part < parts; part += 32) {
        a += first[part * channels + c];
        b += second[part * channels + c];
    }
    #pragma unroll
    for (int by = 16; by > 0; by /= 2) {
        a += __shfl_xor_sync(0xffffffffu, a, by);
        b += __shfl_xor_sync(0xffffffffu, b, by);
    }
    if (lane != 0) return;
#if KIND == 2
    // `in_a` and `in_b` are the old averages.
    const Moments of = moments(a, b, widen(x[c * inner]), n);
    keep(of, n, factor, in_a, in_b, c, out_a, out_b, new_a, new_b);
    if (c == 0) *zero = 0;
    const float by = scale[c] / sqrtf(of.variance + epsilon);
    table[c] = by;
    table[channels + c] = offset[c] - of.mean * by;
#else
    // `in_a` and `in_b` are mean and variance.
    const Slope of = slope_of(a, b, scale[c], in_a[c], in_b[c], epsilon, share);
    out_a[c] = of.scale_grad;
    out_b[c] = a;
    table[c] = of.by;
    table[channels + c] = of.slope;
    table[2 * channels + c] = of.plus;
#endif
}
#else
// The normalised values (4), or the gradient by the values (5). There are fewer than 2³¹ loads in all.
extern "C" __global__ void KOLO_ENTRY(const T* __restrict__ dy, const T* __restrict__ x, const float* __restrict__ table,
                                      T* __restrict__ out, i64 n, i64 channels, i64 inner) {
    const u32 packs = (u32)(inner / WIDTH), all = (u32)(n / WIDTH);
    for (u32 k = blockIdx.x * blockDim.x + threadIdx.x; k < all; k += gridDim.x * blockDim.x) {
        // From the last to the first: what the sums read last is still near.
        const u32 i = all - 1 - k;
        const u32 c = i / packs % (u32)channels;
        P value = ((const P*)x)[i];
#if KIND == 4
        const float by = table[c], plus = table[channels + c];
        #pragma unroll
        for (int j = 0; j < WIDTH; j++) value.at[j] = Narrow<T>::from(widen(value.at[j]) * by + plus);
#else
        const P grad = ((const P*)dy)[i];
        const float by = table[c], slope = table[channels + c], plus = table[2 * channels + c];
        #pragma unroll
        for (int j = 0; j < WIDTH; j++)
            value.at[j] = Narrow<T>::from(widen(grad.at[j]) * by + widen(value.at[j]) * slope + plus);
#endif
        ((P*)out)[i] = value;
    }
}
#endif
