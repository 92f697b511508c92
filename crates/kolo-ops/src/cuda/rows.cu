// Kernels over rows of the last dimension: a block for each row, whose threads share what they find.

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

#if KIND == 0 || KIND == 1
// Softmax, and its logarithm.
extern "C" __global__ void KOLO_ENTRY(const T* in, T* out, i64 n) {
    __shared__ W shared[32];
    const T* x = in + (i64)blockIdx.x * n;
    T* y = out + (i64)blockIdx.x * n;
    W most = LOWEST;
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) { W v = widen(x[i]); most = (v > most || v != v) ? v : most; }
    most = all_max(most, shared);
    W total = 0;
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) total += exp(widen(x[i]) - most);
    total = all_sum(total, shared);
#if KIND == 0
    const W scale = (W)1 / total;
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) y[i] = Narrow<T>::from(exp(widen(x[i]) - most) * scale);
#else
    // The two are not added up: what is left of large logits would be rounded away.
    const W shift = log(total);
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) y[i] = Narrow<T>::from((widen(x[i]) - most) - shift);
#endif
}
#elif KIND == 2
// Cross entropy with probabilities for labels: the loss of each row, and the derivative by the features.
extern "C" __global__ void KOLO_ENTRY(const T* in, const T* labels, T* loss, T* backprop, i64 n, const T* weights, i64 step) {
    __shared__ W shared[32];
    const T* x = in + (i64)blockIdx.x * n;
    const T* label = labels + (i64)blockIdx.x * n;
    T* y = backprop + (i64)blockIdx.x * n;
    W most = LOWEST;
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) { W v = widen(x[i]); most = (v > most || v != v) ? v : most; }
    most = all_max(most, shared);
    W total = 0, dot = 0, labelled = 0;
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) {
        const W v = widen(x[i]) - most, l = widen(label[i]);
        total += exp(v);
        dot += l * v;
        labelled += l;
    }
    total = all_sum(total, shared);
    dot = all_sum(dot, shared);
    labelled = all_sum(labelled, shared);
    const W scale = (W)1 / total, weight = weights == nullptr ? (W)1 : widen(weights[blockIdx.x * step]);
    for (i64 i = threadIdx.x; i < n; i += blockDim.x)
        y[i] = Narrow<T>::from((exp(widen(x[i]) - most) * scale - widen(label[i])) * weight);
    if (threadIdx.x == 0) loss[blockIdx.x] = Narrow<T>::from(labelled * log(total) - dot);
}
#elif KIND == 3
// Cross entropy with class numbers for labels. A number that is no class gives NaN, as in TensorFlow.
extern "C" __global__ void KOLO_ENTRY(const T* in, const L* labels, T* loss, T* backprop, i64 n, const T* weights, i64 step) {
    __shared__ W shared[32];
    const T* x = in + (i64)blockIdx.x * n;
    T* y = backprop + (i64)blockIdx.x * n;
    const i64 label = (i64)labels[blockIdx.x];
    const bool is_bad = label < 0 || label >= n;
    // Read before it is overwritten: the backprop may be the features.
    const W at_label = is_bad ? (W)0 : widen(x[label]);
    W most = LOWEST;
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) { W v = widen(x[i]); most = (v > most || v != v) ? v : most; }
    most = all_max(most, shared);
    W total = 0;
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) total += exp(widen(x[i]) - most);
    total = all_sum(total, shared);
    const W scale = (W)1 / total, nan = (W)__int_as_float(0x7fffffff);
    const W weight = weights == nullptr ? (W)1 : widen(weights[blockIdx.x * step]);
    __syncthreads();
    for (i64 i = threadIdx.x; i < n; i += blockDim.x)
        y[i] = Narrow<T>::from(is_bad ? nan : (exp(widen(x[i]) - most) * scale - (i == label ? (W)1 : (W)0)) * weight);
    if (threadIdx.x == 0) loss[blockIdx.x] = Narrow<T>::from(is_bad ? nan : log(total) - (at_label - most));
}
#elif KIND == 4
// Layer norm of a row.
extern "C" __global__ void KOLO_ENTRY(const T* in, const T* scale, const T* offset, T* out, i64 n, float epsilon) {
    __shared__ W shared[32];
    const T* x = in + (i64)blockIdx.x * n;
    T* y = out + (i64)blockIdx.x * n;
    W sum = 0;
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) sum += widen(x[i]);
    const W mean = all_sum(sum, shared) / (W)n;
    W squares = 0;
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) { const W d = widen(x[i]) - mean; squares += d * d; }
    const W rstd = (W)1 / sqrt(all_sum(squares, shared) / (W)n + (W)epsilon);
    for (i64 i = threadIdx.x; i < n; i += blockDim.x)
        y[i] = Narrow<T>::from((widen(x[i]) - mean) * rstd * widen(scale[i]) + widen(offset[i]));
}
#elif KIND == 5
// The derivative of layer norm by its input; and what the columns' sums are made of, which another kernel adds up.
extern "C" __global__ void KOLO_ENTRY(const T* grad, const T* in, const T* scale, T* dx, W* stats, i64 n, float epsilon) {
    __shared__ W shared[32];
    const T* x = in + (i64)blockIdx.x * n;
    const T* dy = grad + (i64)blockIdx.x * n;
    T* y = dx + (i64)blockIdx.x * n;
    W sum = 0;
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) sum += widen(x[i]);
    const W mean = all_sum(sum, shared) / (W)n;
    W squares = 0;
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) { const W d = widen(x[i]) - mean; squares += d * d; }
    const W rstd = (W)1 / sqrt(all_sum(squares, shared) / (W)n + (W)epsilon);
    W a = 0, b = 0;
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) {
        const W g = widen(dy[i]) * widen(scale[i]);
        a += g;
        b += g * (widen(x[i]) - mean) * rstd;
    }
    a = all_sum(a, shared) / (W)n;
    b = all_sum(b, shared) / (W)n;
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) {
        const W hat = (widen(x[i]) - mean) * rstd;
        y[i] = Narrow<T>::from((widen(dy[i]) * widen(scale[i]) - a - hat * b) * rstd);
    }
    if (threadIdx.x == 0) { stats[2 * (i64)blockIdx.x] = mean; stats[2 * (i64)blockIdx.x + 1] = rstd; }
}
#elif KIND == 6
// The derivatives of layer norm by scale and offset: sums down the columns, of one part of the rows each.
extern "C" __global__ void KOLO_ENTRY(const T* grad, const T* in, const W* stats, W* dscale, W* doffset, i64 n, i64 rows) {
    const i64 column = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= n) return;
    const i64 from = rows * blockIdx.y / gridDim.y, to = rows * (blockIdx.y + 1) / gridDim.y;
    W a = 0, b = 0;
    for (i64 r = from; r < to; r++) {
        const W g = widen(grad[r * n + column]);
        a += g * (widen(in[r * n + column]) - stats[2 * r]) * stats[2 * r + 1];
        b += g;
    }
    dscale[(i64)blockIdx.y * n + column] = a;
    doffset[(i64)blockIdx.y * n + column] = b;
}
#endif
