#if KIND == 0
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
#else
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
#endif
