// What batch norm makes of a channel's sums, in all forms of it.

struct Moments { float mean, variance; };

// From sums of n values, and of their squares, relative to `base`.
__device__ __forceinline__ Moments moments(float sum, float squares, float base, float n) {
    const float shift = sum / n, variance = squares / n - shift * shift;
    return {base + shift, variance > 0.0f ? variance : 0.0f};
}

// Stores them, and what running averages should see, mixed with the old ones by `factor`.
__device__ __forceinline__ void keep(Moments of, float n, float factor, const float* old_mean, const float* old_variance, i64 c,
                                     float* mean, float* variance, float* new_mean, float* new_variance) {
    const float whole = of.variance * (n / (n - 1.0f > 1.0f ? n - 1.0f : 1.0f));
    mean[c] = of.mean;
    variance[c] = of.variance;
    new_mean[c] = factor == 1.0f ? of.mean : old_mean[c] * (1.0f - factor) + of.mean * factor;
    new_variance[c] = factor == 1.0f ? whole : old_variance[c] * (1.0f - factor) + whole * factor;
}

// The gradient by the values is dy · by + x · slope + plus.
struct Slope { float scale_grad, by, slope, plus; };

// From sums of dy and of dy · (x - mean). `share` is one over the elements of a channel if mean and variance depend on them, else 0.
__device__ __forceinline__ Slope slope_of(float sum, float product, float scale, float mean, float variance, float epsilon,
                                          float share) {
    const float inverse = 1.0f / sqrtf(variance + epsilon), by = scale * inverse;
    const float scale_grad = product * inverse, slope = -by * scale_grad * inverse * share;
    return {scale_grad, by, slope, -by * sum * share - mean * slope};
}
