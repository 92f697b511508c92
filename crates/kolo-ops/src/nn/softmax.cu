// Softmax of a row (KIND 0), or its logarithm (KIND 1).
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
