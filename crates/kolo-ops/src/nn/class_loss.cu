// Cross entropy of class numbers: a block for each row, whose numbers are read WIDTH at a time. The text before this defines T,
// L (the labels' type), WIDTH and KIND.

#if KIND == 0
// The loss of each row, and the logarithm of its sum of exponentials. One pass: a thread keeps its largest number so far, and
// its sum relative to it. A number that is no class gives NaN.
extern "C" __global__ void KOLO_ENTRY(const T* logits, const L* labels, float* loss, float* lse, i64 n) {
    __shared__ float tops[32], sums[32];
    const T* row = logits + (i64)blockIdx.x * n;
    const i64 packs = n / WIDTH;
    float top = -3.402823466e38f, sum = 0;
    for (i64 i = threadIdx.x; i < packs; i += blockDim.x) {
        const Pack<T, WIDTH> pack = ((const Pack<T, WIDTH>*)row)[i];
        float most = top;
        #pragma unroll
        for (int j = 0; j < WIDTH; j++) { const float x = widen(pack.at[j]); most = x > most ? x : most; }
        float part = 0;
        #pragma unroll
        for (int j = 0; j < WIDTH; j++) part += __expf(widen(pack.at[j]) - most);
        sum = sum * __expf(top - most) + part;
        top = most;
    }
    #pragma unroll
    for (int by = 16; by > 0; by /= 2) {
        const float other_top = __shfl_xor_sync(0xffffffffu, top, by), other = __shfl_xor_sync(0xffffffffu, sum, by);
        const float most = other_top > top ? other_top : top;
        sum = sum * __expf(top - most) + other * __expf(other_top - most);
        top = most;
    }
    if (threadIdx.x % 32 == 0) { tops[threadIdx.x / 32] = top; sums[threadIdx.x / 32] = sum; }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < (int)blockDim.x / 32; w++) {
            const float most = tops[w] > top ? tops[w] : top;
            sum = sum * __expf(top - most) + sums[w] * __expf(tops[w] - most);
            top = most;
        }
        const i64 label = (i64)labels[blockIdx.x];
        const float total = top + logf(sum);
        lse[blockIdx.x] = total;
        loss[blockIdx.x] = label < 0 || label >= n ? __int_as_float(0x7fffffff) : total - widen(row[label]);
    }
}
#else
// The gradient of the logits, which may lie where the logits are: a thread reads a pack before it writes it.
extern "C" __global__ void KOLO_ENTRY(const float* dloss, const T* logits, const L* labels, const float* lse, T* out, i64 n) {
    if (logits == nullptr) logits = out;
    const i64 at = (i64)blockIdx.x * n, packs = n / WIDTH, label = (i64)labels[blockIdx.x];
    const float by = label < 0 || label >= n ? __int_as_float(0x7fffffff) : dloss[blockIdx.x], shift = lse[blockIdx.x];
    for (i64 i = threadIdx.x; i < packs; i += blockDim.x) {
        Pack<T, WIDTH> pack = ((const Pack<T, WIDTH>*)(logits + at))[i];
        #pragma unroll
        for (int j = 0; j < WIDTH; j++)
            pack.at[j] = Narrow<T>::from((__expf(widen(pack.at[j]) - shift) - (i * WIDTH + j == label ? 1.0f : 0.0f)) * by);
        ((Pack<T, WIDTH>*)(out + at))[i] = pack;
    }
}
#endif
