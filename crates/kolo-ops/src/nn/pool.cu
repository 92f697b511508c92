// Pools over images of `channels` that lie side by side: a thread for each element of what is written, or for PER of them side
// by side. N is a whole number that holds every index. CHANNELS is their number if it is one, else 0.

// Sizes of the window that are known when the kernel is compiled, or 0.
template <int KERNEL, int STRIDE, int DILATION> struct Window {
    N input, output, any_kernel, any_stride, any_dilation, before;
    __device__ __forceinline__ N size() const { return KERNEL ? KERNEL : any_kernel; }
    __device__ __forceinline__ N step() const { return STRIDE ? STRIDE : any_stride; }
    __device__ __forceinline__ N apart() const { return DILATION ? DILATION : any_dilation; }
    // The first tap at place o that is in the image, and the first beyond it.
    __device__ __forceinline__ N first(N o) const {
        const N miss = before - o * step();
        return miss > 0 ? (miss + apart() - 1) / apart() : 0;
    }
    __device__ __forceinline__ N last(N o) const {
        const N room = before + input - o * step();
        const N n = room > 0 ? (room + apart() - 1) / apart() : 0;
        return n < size() ? n : size();
    }
    __device__ __forceinline__ N at(N o, N k) const { return o * step() + k * apart() - before; }
    // The first and the last place of the window that can touch i.
    __device__ __forceinline__ N from(N i) const {
        const N reach = (size() - 1) * apart(), x = i + before - reach;
        return x > 0 ? (x + step() - 1) / step() : 0;
    }
    __device__ __forceinline__ N to(N i) const {
        const N o = (i + before) / step();
        return o < output - 1 ? o : output - 1;
    }
    // The tap that is on i at place o, or -1.
    __device__ __forceinline__ N tap(N o, N i) const {
        const N x = i + before - o * step();
        return x >= 0 && x % apart() == 0 && x / apart() < size() ? x / apart() : -1;
    }
};
typedef Window<TALL, STEP_H, APART_H> Height;
typedef Window<BROAD, STEP_W, APART_W> Breadth;

#if KIND == 0 || KIND == 2
// The largest value (0) or the mean (2) under each window.
extern "C" __global__ void KOLO_ENTRY(const T* in, T* out, N n, N any_channels, Height h, Breadth w) {
    const N channels = CHANNELS ? CHANNELS : any_channels;
    for (N i = (N)thread_number(); i < n / PER; i += (N)n_threads()) {
        const N c = i * PER % channels, ow = i * PER / channels % w.output, oh = i * PER / channels / w.output % h.output;
        const N image = i * PER / channels / w.output / h.output;
        const T* x = in + (i64)image * h.input * w.input * channels + c;
        W value[PER];
        #pragma unroll
        for (int j = 0; j < PER; j++) value[j] = KIND == 0 ? -INFINITE : (W)0;
        const N h0 = h.first(oh), h1 = h.last(oh), w0 = w.first(ow), w1 = w.last(ow);
        for (N kh = h0; kh < h1; kh++)
            for (N kw = w0; kw < w1; kw++) {
                const Pack<T, PER> v = *(const Pack<T, PER>*)(x + (h.at(oh, kh) * w.input + w.at(ow, kw)) * channels);
                #pragma unroll
                for (int j = 0; j < PER; j++) {
#if KIND == 0
                    value[j] = larger(value[j], widen(v.at[j]));
#else
                    value[j] += widen(v.at[j]);
#endif
                }
            }
        Pack<T, PER> y;
        #pragma unroll
        for (int j = 0; j < PER; j++) {
#if KIND == 2
            value[j] *= (W)1 / (W)((h1 - h0) * (w1 - w0));
#endif
            y.at[j] = Narrow<T>::from(value[j]);
        }
        ((Pack<T, PER>*)out)[i] = y;
    }
}
#elif KIND == 1
// The gradient of the largest value: each input asks the windows over it whether it was the first of the largest.
extern "C" __global__ void KOLO_ENTRY(const T* in, const T* top, const T* grad, T* out, N n, N any_channels, Height h, Breadth w) {
    const N channels = CHANNELS ? CHANNELS : any_channels;
    for (N i = (N)thread_number(); i < n; i += (N)n_threads()) {
        const N c = i % channels, iw = i / channels % w.input, ih = i / channels / w.input % h.input;
        const N image = i / channels / w.input / h.input;
        const T* x = in + (i64)image * h.input * w.input * channels + c;
        const N base = image * h.output * w.output * channels + c;
        const W mine = widen(in[i]);
        W sum = 0;
        for (N oh = h.from(ih); oh <= h.to(ih); oh++) {
            const N my_h = h.tap(oh, ih);
            if (my_h < 0) continue;
            for (N ow = w.from(iw); ow <= w.to(iw); ow++) {
                const N my_w = w.tap(ow, iw);
                if (my_w < 0) continue;
                const N o = base + (oh * w.output + ow) * channels;
                if (!(mine == widen(top[o]))) continue;
                bool is_first = true;
                const N w0 = w.first(ow), w1 = w.last(ow);
                for (N kh = h.first(oh); is_first && kh <= my_h; kh++)
                    for (N kw = w0; kw < (kh == my_h ? my_w : w1); kw++)
                        if (widen(x[(h.at(oh, kh) * w.input + w.at(ow, kw)) * channels]) == mine) {
                            is_first = false;
                            break;
                        }
                if (is_first) sum += widen(grad[o]);
            }
        }
        if (RELU && !(mine > (W)0)) sum = 0;
        out[i] = Narrow<T>::from(sum);
    }
}
#elif KIND == 3
// The gradient of the mean.
extern "C" __global__ void KOLO_ENTRY(const T* grad, T* out, N n, N any_channels, Height h, Breadth w) {
    const N channels = CHANNELS ? CHANNELS : any_channels;
    for (N i = (N)thread_number(); i < n; i += (N)n_threads()) {
        const N c = i % channels, iw = i / channels % w.input, ih = i / channels / w.input % h.input;
        const N base = i / channels / w.input / h.input * h.output * w.output * channels + c;
        W sum = 0;
        for (N oh = h.from(ih); oh <= h.to(ih); oh++) {
            if (h.tap(oh, ih) < 0) continue;
            for (N ow = w.from(iw); ow <= w.to(iw); ow++) {
                if (w.tap(ow, iw) < 0) continue;
                const N taps = (h.last(oh) - h.first(oh)) * (w.last(ow) - w.first(ow));
                sum += widen(grad[base + (oh * w.output + ow) * channels]) * ((W)1 / (W)taps);
            }
        }
        out[i] = Narrow<T>::from(sum);
    }
}
#elif KIND == 4
// The gradient of the largest value under windows of TALL by BROAD that lie side by side and cover the image: a thread reads a
// window and writes all of its gradients. With BIAS, what was pooled is `in` with a bias added, and then Relu.
#if BIAS
extern "C" __global__ void KOLO_ENTRY(const T* in, const T* bias, const T* grad, T* out, N n, N any_channels, Height h, Breadth w) {
    const N channels = CHANNELS ? CHANNELS : any_channels;
#else
extern "C" __global__ void KOLO_ENTRY(const T* in, const T* top, const T* grad, T* out, N n, N any_channels, Height h, Breadth w) {
    const N channels = CHANNELS ? CHANNELS : any_channels;
#endif
    const N windows = n / (TALL * BROAD) / PER;
    for (N i = (N)thread_number(); i < windows; i += (N)n_threads()) {
        const N c = i * PER % channels, ow = i * PER / channels % w.output, oh = i * PER / channels / w.output % h.output;
        const N image = i * PER / channels / w.output / h.output;
        const i64 base = ((i64)(image * h.input + oh * TALL) * w.input + ow * BROAD) * channels + c;
        Pack<T, PER> x[TALL * BROAD];
        #pragma unroll
        for (int k = 0; k < TALL * BROAD; k++)
            x[k] = *(const Pack<T, PER>*)(in + base + (i64)(k / BROAD * w.input + k % BROAD) * channels);
        const Pack<T, PER> g = ((const Pack<T, PER>*)grad)[i];
#if BIAS
        const Pack<T, PER> b = *(const Pack<T, PER>*)(bias + c);
        #pragma unroll
        for (int k = 0; k < TALL * BROAD; k++)
            #pragma unroll
            for (int j = 0; j < PER; j++) x[k].at[j] = Narrow<T>::from(widen(x[k].at[j]) + widen(b.at[j]));
#endif
        Pack<T, PER> y[TALL * BROAD];
        #pragma unroll
        for (int j = 0; j < PER; j++) {
            W most = -INFINITE;
            #pragma unroll
            for (int k = 0; k < TALL * BROAD; k++) most = larger(most, widen(x[k].at[j]));
            bool is_open = !RELU || most > (W)0;
            #pragma unroll
            for (int k = 0; k < TALL * BROAD; k++) {
                const bool is_it = is_open && widen(x[k].at[j]) == most;
                y[k].at[j] = is_it ? g.at[j] : Narrow<T>::from((W)0);
                if (is_it) is_open = false;
            }
        }
        #pragma unroll
        for (int k = 0; k < TALL * BROAD; k++)
            *(Pack<T, PER>*)(out + base + (i64)(k / BROAD * w.input + k % BROAD) * channels) = y[k];
    }
}
#elif KIND == 5
// Which tap of each window was the first of the largest; 255 if none was, or if a Relu before the pool lets no gradient through.
extern "C" __global__ void KOLO_ENTRY(const T* in, const T* top, u8* taps, N n, N any_channels, Height h, Breadth w) {
    const N channels = CHANNELS ? CHANNELS : any_channels;
    for (N i = (N)thread_number(); i < n / PER; i += (N)n_threads()) {
        const N c = i * PER % channels, ow = i * PER / channels % w.output, oh = i * PER / channels / w.output % h.output;
        const N image = i * PER / channels / w.output / h.output;
        const T* x = in + (i64)image * h.input * w.input * channels + c;
        const Pack<T, PER> most = ((const Pack<T, PER>*)top)[i];
        Pack<u8, PER> tap;
        #pragma unroll
        for (int j = 0; j < PER; j++) tap.at[j] = 255;
        // From the last to the first, so that the first stays.
        for (N kh = h.last(oh) - 1; kh >= h.first(oh); kh--)
            for (N kw = w.last(ow) - 1; kw >= w.first(ow); kw--) {
                const Pack<T, PER> v = *(const Pack<T, PER>*)(x + (h.at(oh, kh) * w.input + w.at(ow, kw)) * channels);
                #pragma unroll
                for (int j = 0; j < PER; j++)
                    if (widen(v.at[j]) == widen(most.at[j]) && (!RELU || widen(v.at[j]) > (W)0)) tap.at[j] = (u8)(kh * w.size() + kw);
            }
        ((Pack<u8, PER>*)taps)[i] = tap;
    }
}
#elif KIND == 6 && CHANNELS == 1 && PER > 1
// The same gradient of planes: a thread has PER neighbouring pixels of a row, and looks at each window over them once.
extern "C" __global__ void KOLO_ENTRY(const u8* taps, const T* grad, T* out, N n, N any_channels, Height h, Breadth w) {
    for (N i = (N)thread_number(); i < n / PER; i += (N)n_threads()) {
        const N iw = i * PER % w.input, ih = i * PER / w.input % h.input;
        const N base = i * PER / w.input / h.input * h.output * w.output;
        W sum[PER];
        #pragma unroll
        for (int j = 0; j < PER; j++) sum[j] = 0;
        for (N oh = h.from(ih); oh <= h.to(ih); oh++) {
            const N my_h = h.tap(oh, ih);
            if (my_h < 0) continue;
            for (N ow = w.from(iw); ow <= w.to(iw + PER - 1); ow++) {
                const N o = base + oh * w.output + ow, tap = taps[o];
                const W g = widen(grad[o]);
                const N to = tap / w.size() == my_h ? w.at(ow, tap % w.size()) - iw : (N)-1;
                #pragma unroll
                for (int j = 0; j < PER; j++)
                    if (to == j) sum[j] += g;
            }
        }
        Pack<T, PER> y;
        #pragma unroll
        for (int j = 0; j < PER; j++) y.at[j] = Narrow<T>::from(sum[j]);
        ((Pack<T, PER>*)out)[i] = y;
    }
}
#elif KIND == 6
// The gradient of the largest value where windows overlap: each input adds what the windows over it have for its tap.
extern "C" __global__ void KOLO_ENTRY(const u8* taps, const T* grad, T* out, N n, N any_channels, Height h, Breadth w) {
    const N channels = CHANNELS ? CHANNELS : any_channels;
    for (N i = (N)thread_number(); i < n / PER; i += (N)n_threads()) {
        const N c = i * PER % channels, iw = i * PER / channels % w.input, ih = i * PER / channels / w.input % h.input;
        const N base = i * PER / channels / w.input / h.input * h.output * w.output * channels + c;
        W sum[PER];
        #pragma unroll
        for (int j = 0; j < PER; j++) sum[j] = 0;
        for (N oh = h.from(ih); oh <= h.to(ih); oh++) {
            const N my_h = h.tap(oh, ih);
            if (my_h < 0) continue;
            for (N ow = w.from(iw); ow <= w.to(iw); ow++) {
                const N my_w = w.tap(ow, iw);
                if (my_w < 0) continue;
                const N o = (base + (oh * w.output + ow) * channels) / PER;
                const Pack<u8, PER> tap = ((const Pack<u8, PER>*)taps)[o];
                const Pack<T, PER> g = ((const Pack<T, PER>*)grad)[o];
                const u8 mine = (u8)(my_h * w.size() + my_w);
                #pragma unroll
                for (int j = 0; j < PER; j++)
                    if (tap.at[j] == mine) sum[j] += widen(g.at[j]);
            }
        }
        Pack<T, PER> y;
        #pragma unroll
        for (int j = 0; j < PER; j++) y.at[j] = Narrow<T>::from(sum[j]);
        ((Pack<T, PER>*)out)[i] = y;
    }
}
#elif KIND == 7
// The largest value under windows of TALL by BROAD that lie side by side and cover the image. With BIAS, of what is pooled with
// a bias added, and then Relu.
#if BIAS
extern "C" __global__ void KOLO_ENTRY(const T* in, const T* bias, T* out, N n, N any_channels, Height h, Breadth w) {
    const N channels = CHANNELS ? CHANNELS : any_channels;
#else
extern "C" __global__ void KOLO_ENTRY(const T* in, T* out, N n, N any_channels, Height h, Breadth w) {
    const N channels = CHANNELS ? CHANNELS : any_channels;
#endif
    for (N i = (N)thread_number(); i < n / PER; i += (N)n_threads()) {
        const N c = i * PER % channels, ow = i * PER / channels % w.output, oh = i * PER / channels / w.output % h.output;
        const N image = i * PER / channels / w.output / h.output;
        const i64 base = ((i64)(image * h.input + oh * TALL) * w.input + ow * BROAD) * channels + c;
        Pack<T, PER> x[TALL * BROAD];
        #pragma unroll
        for (int k = 0; k < TALL * BROAD; k++)
            x[k] = *(const Pack<T, PER>*)(in + base + (i64)(k / BROAD * w.input + k % BROAD) * channels);
#if BIAS
        const Pack<T, PER> b = *(const Pack<T, PER>*)(bias + c);
#endif
        Pack<T, PER> y;
        #pragma unroll
        for (int j = 0; j < PER; j++) {
            W most = -INFINITE;
            #pragma unroll
            for (int k = 0; k < TALL * BROAD; k++) {
#if BIAS
                W value = widen(Narrow<T>::from(widen(x[k].at[j]) + widen(b.at[j])));
                if (value < (W)0) value = 0;
                most = larger(most, value);
#else
                most = larger(most, widen(x[k].at[j]));
#endif
            }
            y.at[j] = Narrow<T>::from(most);
        }
        ((Pack<T, PER>*)out)[i] = y;
    }
}
#endif
