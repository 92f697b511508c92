// Attention for any float and any size of head: a warp for each query, or each key, with its rows in registers, LANES numbers
// in each lane. The text before this defines T, W, LANES and KIND.

#define INFINITE ((W)__int_as_float(0x7f800000))

struct Attention {
    i64 batch, length, heads, size, causal;
    __device__ __forceinline__ i64 width() const { return heads * size; }
};

__device__ __forceinline__ W all_lanes(W x) {
    for (int by = 16; by > 0; by /= 2) x += __shfl_xor_sync(0xffffffffu, x, by);
    return x;
}

__device__ __forceinline__ void load(W (&to)[LANES], const T* row, i64 size) {
    #pragma unroll
    for (int i = 0; i < LANES; i++) {
        const i64 at = threadIdx.x % 32 + 32 * i;
        to[i] = at < size ? widen(row[at]) : (W)0;
    }
}

__device__ __forceinline__ void save(T* row, const W (&from)[LANES], i64 size, W factor) {
    #pragma unroll
    for (int i = 0; i < LANES; i++) {
        const i64 at = threadIdx.x % 32 + 32 * i;
        if (at < size) row[at] = Narrow<T>::from(from[i] * factor);
    }
}

__device__ __forceinline__ W dot(const W (&a)[LANES], const W (&b)[LANES]) {
    W sum = 0;
    #pragma unroll
    for (int i = 0; i < LANES; i++) sum += a[i] * b[i];
    return all_lanes(sum);
}

#if KIND == 0
extern "C" __global__ void KOLO_ENTRY(const T* qkv, T* y, float* lse, Attention of, W scale) {
    const i64 warps = n_threads() / 32, width = of.width(), stride = 3 * width;
    for (i64 job = thread_number() / 32; job < of.batch * of.heads * of.length; job += warps) {
        const i64 query = job % of.length, head = job / of.length % of.heads, batch = job / of.length / of.heads;
        const T* base = qkv + batch * of.length * stride + head * of.size;
        W q[LANES], o[LANES], x[LANES], top = -INFINITE, sum = 0;
        load(q, base + query * stride, of.size);
        for (int i = 0; i < LANES; i++) o[i] = 0;
        for (i64 key = 0; key < (of.causal ? query + 1 : of.length); key++) {
            load(x, base + key * stride + width, of.size);
            const W score = dot(q, x) * scale, most = score > top ? score : top;
            const W fade = exp(top - most), share = exp(score - most);
            top = most;
            sum = sum * fade + share;
            load(x, base + key * stride + 2 * width, of.size);
            for (int i = 0; i < LANES; i++) o[i] = o[i] * fade + share * x[i];
        }
        save(y + (batch * of.length + query) * width + head * of.size, o, of.size, (W)1 / sum);
        if (threadIdx.x % 32 == 0) lse[job] = (float)(top + log(sum));
    }
}
#elif KIND == 1
// The gradient of the queries; and for each query the sum that its scores' gradients share.
extern "C" __global__ void KOLO_ENTRY(const T* qkv, const T* y, const T* dy, const float* lse, W* delta, T* dqkv, Attention of,
                                      W scale) {
    const i64 warps = n_threads() / 32, width = of.width(), stride = 3 * width;
    for (i64 job = thread_number() / 32; job < of.batch * of.heads * of.length; job += warps) {
        const i64 query = job % of.length, head = job / of.length % of.heads, batch = job / of.length / of.heads;
        const i64 base = batch * of.length * stride + head * of.size;
        const i64 at = (batch * of.length + query) * width + head * of.size;
        W q[LANES], d[LANES], dq[LANES], k[LANES], x[LANES];
        load(q, qkv + base + query * stride, of.size);
        load(d, dy + at, of.size);
        load(x, y + at, of.size);
        const W mean = dot(d, x), shift = (W)lse[job];
        if (threadIdx.x % 32 == 0) delta[job] = mean;
        for (int i = 0; i < LANES; i++) dq[i] = 0;
        for (i64 key = 0; key < (of.causal ? query + 1 : of.length); key++) {
            load(k, qkv + base + key * stride + width, of.size);
            load(x, qkv + base + key * stride + 2 * width, of.size);
            const W ds = exp(dot(q, k) * scale - shift) * (dot(d, x) - mean);
            for (int i = 0; i < LANES; i++) dq[i] += ds * k[i];
        }
        save(dqkv + base + query * stride, dq, of.size, scale);
    }
}
#elif KIND == 2
// The gradients of keys and values.
extern "C" __global__ void KOLO_ENTRY(const T* qkv, const T* dy, const float* lse, const W* delta, T* dqkv, Attention of,
                                      W scale) {
    const i64 warps = n_threads() / 32, width = of.width(), stride = 3 * width;
    for (i64 job = thread_number() / 32; job < of.batch * of.heads * of.length; job += warps) {
        const i64 key = job % of.length, rest = job / of.length, head = rest % of.heads, batch = rest / of.heads;
        const i64 base = batch * of.length * stride + head * of.size;
        W k[LANES], v[LANES], dk[LANES], dv[LANES], q[LANES], d[LANES];
        load(k, qkv + base + key * stride + width, of.size);
        load(v, qkv + base + key * stride + 2 * width, of.size);
        for (int i = 0; i < LANES; i++) { dk[i] = 0; dv[i] = 0; }
        for (i64 query = of.causal ? key : 0; query < of.length; query++) {
            load(q, qkv + base + query * stride, of.size);
            load(d, dy + (batch * of.length + query) * width + head * of.size, of.size);
            const W share = exp(dot(q, k) * scale - (W)lse[rest * of.length + query]);
            const W ds = share * (dot(d, v) - delta[rest * of.length + query]);
            for (int i = 0; i < LANES; i++) { dk[i] += ds * q[i]; dv[i] += share * d[i]; }
        }
        save(dqkv + base + key * stride + width, dk, of.size, scale);
        save(dqkv + base + key * stride + 2 * width, dv, of.size, (W)1);
    }
}
#endif
