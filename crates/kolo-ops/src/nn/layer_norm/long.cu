#if KIND == 0
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
#elif KIND == 1
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
#else
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
