// Pools over images of `channels` that lie side by side: a thread for each element of what is written.

struct Window {
    i64 input, output, kernel, stride, dilation, before;
    // The first tap at place o that is in the image, and the first beyond it.
    __device__ __forceinline__ i64 first(i64 o) const {
        const i64 miss = before - o * stride;
        return miss > 0 ? (miss + dilation - 1) / dilation : 0;
    }
    __device__ __forceinline__ i64 last(i64 o) const {
        const i64 room = before + input - o * stride;
        const i64 n = room > 0 ? (room + dilation - 1) / dilation : 0;
        return n < kernel ? n : kernel;
    }
    __device__ __forceinline__ i64 at(i64 o, i64 k) const { return o * stride + k * dilation - before; }
    // The first and the last place of the window that can touch i.
    __device__ __forceinline__ i64 from(i64 i) const {
        const i64 reach = (kernel - 1) * dilation, x = i + before - reach;
        return x > 0 ? (x + stride - 1) / stride : 0;
    }
    __device__ __forceinline__ i64 to(i64 i) const {
        const i64 o = (i + before) / stride;
        return o < output - 1 ? o : output - 1;
    }
    // The tap that is on i at place o, or -1.
    __device__ __forceinline__ i64 tap(i64 o, i64 i) const {
        const i64 x = i + before - o * stride;
        return x >= 0 && x % dilation == 0 && x / dilation < kernel ? x / dilation : -1;
    }
};

#if KIND == 0 || KIND == 2
// The largest value (0) or the mean (2) under each window.
extern "C" __global__ void KOLO_ENTRY(const T* in, T* out, i64 n, i64 channels, Window h, Window w) {
    for (i64 i = thread_number(); i < n; i += n_threads()) {
        const i64 c = i % channels, ow = i / channels % w.output, oh = i / channels / w.output % h.output;
        const i64 image = i / channels / w.output / h.output;
        const T* x = in + image * h.input * w.input * channels + c;
#if KIND == 0
        W value = -INFINITE;
#else
        W value = 0;
#endif
        const i64 h0 = h.first(oh), h1 = h.last(oh), w0 = w.first(ow), w1 = w.last(ow);
        for (i64 kh = h0; kh < h1; kh++)
            for (i64 kw = w0; kw < w1; kw++) {
                const W v = widen(x[(h.at(oh, kh) * w.input + w.at(ow, kw)) * channels]);
#if KIND == 0
                value = larger(value, v);
#else
                value += v;
#endif
            }
#if KIND == 2
        value *= (W)1 / (W)((h1 - h0) * (w1 - w0));
#endif
        out[i] = Narrow<T>::from(value);
    }
}
#elif KIND == 1
// The gradient of the largest value: each input asks the windows over it whether it was the first of the largest.
extern "C" __global__ void KOLO_ENTRY(const T* in, const T* top, const T* grad, T* out, i64 n, i64 channels, Window h,
                                      Window w) {
    for (i64 i = thread_number(); i < n; i += n_threads()) {
        const i64 c = i % channels, iw = i / channels % w.input, ih = i / channels / w.input % h.input;
        const i64 image = i / channels / w.input / h.input;
        const T* x = in + image * h.input * w.input * channels + c;
        const i64 base = image * h.output * w.output * channels + c;
        const W mine = widen(in[i]);
        W sum = 0;
        for (i64 oh = h.from(ih); oh <= h.to(ih); oh++) {
            const i64 my_h = h.tap(oh, ih);
            if (my_h < 0) continue;
            for (i64 ow = w.from(iw); ow <= w.to(iw); ow++) {
                const i64 my_w = w.tap(ow, iw);
                if (my_w < 0) continue;
                const i64 o = base + (oh * w.output + ow) * channels;
                if (!(mine == widen(top[o]))) continue;
                bool is_first = true;
                const i64 w0 = w.first(ow), w1 = w.last(ow);
                for (i64 kh = h.first(oh); is_first && kh <= my_h; kh++)
                    for (i64 kw = w0; kw < (kh == my_h ? my_w : w1); kw++)
                        if (widen(x[(h.at(oh, kh) * w.input + w.at(ow, kw)) * channels]) == mine) {
                            is_first = false;
                            break;
                        }
                if (is_first) sum += widen(grad[o]);
            }
        }
        out[i] = Narrow<T>::from(sum);
    }
}
#elif KIND == 3
// The gradient of the mean.
extern "C" __global__ void KOLO_ENTRY(const T* grad, T* out, i64 n, i64 channels, Window h, Window w) {
    for (i64 i = thread_number(); i < n; i += n_threads()) {
        const i64 c = i % channels, iw = i / channels % w.input, ih = i / channels / w.input % h.input;
        const i64 base = i / channels / w.input / h.input * h.output * w.output * channels + c;
        W sum = 0;
        for (i64 oh = h.from(ih); oh <= h.to(ih); oh++) {
            if (h.tap(oh, ih) < 0) continue;
            for (i64 ow = w.from(iw); ow <= w.to(iw); ow++) {
                if (w.tap(ow, iw) < 0) continue;
                const i64 taps = (h.last(oh) - h.first(oh)) * (w.last(ow) - w.first(ow));
                sum += widen(grad[base + (oh * w.output + ow) * channels]) * ((W)1 / (W)taps);
            }
        }
        out[i] = Narrow<T>::from(sum);
    }
}
#endif
