// Batch norm of a tensor seen as [outer, channels, inner]. Sums of a channel are taken in parts, which are joined in order, so
// that they are the same each time.

#if KIND == 0 || KIND == 1 || KIND == 2
// Parts of each channel's sums: of x (0), of (x - mean)² (1), of dy and dy · (x - mean) (2). Block (b, p) has 32 channels in x
// if they come last (inner == 1), else one.
extern "C" __global__ void KOLO_ENTRY(const T* x, const T* dy, const float* mean, float* first, float* second, i64 outer,
                                      i64 channels, i64 inner) {
    __shared__ float a_of[256], b_of[256];
    const int t = threadIdx.x;
    const bool last = inner == 1;
    const i64 c = last ? (i64)blockIdx.x * 32 + t % 32 : (i64)blockIdx.x;
    const i64 n = outer * inner, step = (last ? 8 : 256) * (i64)gridDim.y;
    float a = 0, b = 0;
    if (c < channels) {
        const float m = KIND == 0 ? 0.0f : mean[c];
        for (i64 j = (i64)blockIdx.y * (last ? 8 : 256) + (last ? t / 32 : t); j < n; j += step) {
            const i64 at = last ? j * channels + c : (j / inner * channels + c) * inner + j % inner;
            const float v = widen(x[at]) - m;
#if KIND == 0
            a += v;
#elif KIND == 1
            a += v * v;
#else
            const float g = widen(dy[at]);
            a += g;
            b += g * v;
#endif
        }
    }
    a_of[t] = a;
    b_of[t] = b;
    __syncthreads();
    const int least = last ? 32 : 1;
    for (int half = 128; half >= least; half /= 2) {
        if (t < half) { a_of[t] += a_of[t + half]; b_of[t] += b_of[t + half]; }
        __syncthreads();
    }
    if (t < least && c < channels) {
        first[(i64)blockIdx.y * channels + c] = a_of[t];
        if (KIND == 2) second[(i64)blockIdx.y * channels + c] = b_of[t];
    }
}
#elif KIND == 3
// The mean of each channel, of its parts.
extern "C" __global__ void KOLO_ENTRY(const float* parts, float* mean, i64 n_parts, i64 channels, float n) {
    for (i64 c = thread_number(); c < channels; c += n_threads()) {
        float sum = 0;
        for (i64 p = 0; p < n_parts; p++) sum += parts[p * channels + c];
        mean[c] = sum / n;
    }
}
#elif KIND == 4
// What a running average should see: mean and variance without bias, mixed with the old ones by a factor below 1.
extern "C" __global__ void KOLO_ENTRY(const float* mean, const float* variance, const float* old_mean,
                                      const float* old_variance, float* new_mean, float* new_variance, i64 channels, float n,
                                      float factor) {
    for (i64 c = thread_number(); c < channels; c += n_threads()) {
        const float m = mean[c], v = variance[c] * (n / (n - 1.0f > 1.0f ? n - 1.0f : 1.0f));
        new_mean[c] = factor == 1.0f ? m : old_mean[c] * (1.0f - factor) + m * factor;
        new_variance[c] = factor == 1.0f ? v : old_variance[c] * (1.0f - factor) + v * factor;
    }
}
#elif KIND == 5
// The normalised values.
extern "C" __global__ void KOLO_ENTRY(const T* x, const float* scale, const float* offset, const float* mean,
                                      const float* variance, T* y, i64 n, i64 channels, i64 inner, float epsilon) {
    for (i64 i = thread_number(); i < n; i += n_threads()) {
        const i64 c = i / inner % channels;
        const float a = scale[c] / sqrtf(variance[c] + epsilon);
        y[i] = Narrow<T>::from((widen(x[i]) - mean[c]) * a + offset[c]);
    }
}
#elif KIND == 6
// The gradients by scale and offset, of the parts of their sums.
extern "C" __global__ void KOLO_ENTRY(const float* first, const float* second, const float* variance, float* scale_grad,
                                      float* offset_grad, i64 n_parts, i64 channels, float epsilon) {
    for (i64 c = thread_number(); c < channels; c += n_threads()) {
        float a = 0, b = 0;
        for (i64 p = 0; p < n_parts; p++) { a += first[p * channels + c]; b += second[p * channels + c]; }
        offset_grad[c] = a;
        scale_grad[c] = b / sqrtf(variance[c] + epsilon);
    }
}
#elif KIND == 7
// The gradient by the values. `share` is one over the elements of a channel if mean and variance depend on them, else 0.
extern "C" __global__ void KOLO_ENTRY(const T* dy, const T* x, const float* scale, const float* mean, const float* variance,
                                      const float* scale_grad, const float* offset_grad, T* dx, i64 n, i64 channels, i64 inner,
                                      float epsilon, float share) {
    for (i64 i = thread_number(); i < n; i += n_threads()) {
        const i64 c = i / inner % channels;
        const float inverse = 1.0f / sqrtf(variance[c] + epsilon);
        const float centred = widen(x[i]) - mean[c];
        dx[i] = Narrow<T>::from(scale[c] * inverse
                                * (widen(dy[i]) - offset_grad[c] * share - centred * (scale_grad[c] * inverse * share)));
    }
}
#endif
