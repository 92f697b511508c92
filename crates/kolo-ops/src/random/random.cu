// Philox4x32-10 (Salmon et al., 2011) and the distributions made of it, with the positions and formulas of the CPU's
// kernels, which are TensorFlow's.

struct Position { u64 low, high; u32 key[2]; };

struct Words { u32 at[4]; };

__device__ __forceinline__ Words philox(Position p, u64 skip) {
    u64 low = p.low + skip, high = p.high + (low < skip ? 1 : 0);
    u32 a = (u32)low, b = (u32)(low >> 32), c = (u32)high, d = (u32)(high >> 32), k0 = p.key[0], k1 = p.key[1];
    #pragma unroll
    for (int round = 0; round < 10; round++) {
        const u64 first = (u64)0xD2511F53u * a, second = (u64)0xCD9E8D57u * c;
        const u32 na = (u32)(second >> 32) ^ b ^ k0, nc = (u32)(first >> 32) ^ d ^ k1;
        b = (u32)second;
        d = (u32)first;
        a = na;
        c = nc;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    Words words = {{a, b, c, d}};
    return words;
}

__device__ __forceinline__ float uniform_f32(u32 word) { return __uint_as_float(127u << 23 | (word & 0x007fffffu)) - 1.0f; }
__device__ __forceinline__ double uniform_f64(u32 high, u32 low) {
    return __longlong_as_double((i64)((u64)1023 << 52 | (u64)(high & 0x000fffffu) << 32 | low)) - 1.0;
}

__device__ __forceinline__ void normal_pair(u32 a, u32 b, float* out) {
    const float u = uniform_f32(a);
    const float radius = sqrtf(-2.0f * logf(u > 1.0e-7f ? u : 1.0e-7f));
    const float angle = (float)(2.0 * 3.14159265358979323846 * (double)uniform_f32(b));
    out[0] = sinf(angle) * radius;
    out[1] = cosf(angle) * radius;
}

__device__ __forceinline__ void normal_pair_f64(const u32* words, double* out) {
    const double u = uniform_f64(words[0], words[1]);
    const double radius = sqrt(-2.0 * log(u > 1.0e-7 ? u : 1.0e-7));
    const double angle = 2.0 * 3.14159265358979323846 * uniform_f64(words[2], words[3]);
    out[0] = sin(angle) * radius;
    out[1] = cos(angle) * radius;
}

// KIND: 0 uniform, 1 normal, 2 truncated normal. IS_DOUBLE: two outputs of four words instead of four.
#if IS_DOUBLE
#define GROUP 2
#else
#define GROUP 4
#endif

template <typename U> struct UniformOf { static __device__ __forceinline__ U from(u32 word) { return (U)uniform_f32(word); } };
template <> struct UniformOf<f16> {
    static __device__ __forceinline__ f16 from(u32 word) {
        f16 x = {(u16)(0x3c00u | (word & 0x03ffu))};
        return Narrow<f16>::from(widen(x) - 1.0f);
    }
};
template <> struct UniformOf<bf16> {
    static __device__ __forceinline__ bf16 from(u32 word) {
        bf16 x = {(u16)(0x3f80u | (word & 0x007fu))};
        return Narrow<bf16>::from(widen(x) - 1.0f);
    }
};

extern "C" __global__ void KOLO_ENTRY(T* out, i64 n, Position start) {
    const i64 groups = (n + GROUP - 1) / GROUP;
    for (i64 g = thread_number(); g < groups; g += n_threads()) {
        T values[GROUP];
#if KIND == 0
        const Words w = philox(start, (u64)g);
#if IS_DOUBLE
        values[0] = uniform_f64(w.at[0], w.at[1]);
        values[1] = uniform_f64(w.at[2], w.at[3]);
#else
        for (int k = 0; k < 4; k++) values[k] = UniformOf<T>::from(w.at[k]);
#endif
#elif KIND == 1
        const Words w = philox(start, (u64)g);
#if IS_DOUBLE
        normal_pair_f64(w.at, values);
#else
        float pair[4];
        normal_pair(w.at[0], w.at[1], pair);
        normal_pair(w.at[2], w.at[3], pair + 2);
        for (int k = 0; k < 4; k++) values[k] = Narrow<T>::from(pair[k]);
#endif
#else
        u64 at = (u64)g * (GROUP * 256 / 4);
        int n_found = 0;
        while (n_found < GROUP) {
            const Words w = philox(start, at++);
#if IS_DOUBLE
            double pair[2];
            normal_pair_f64(w.at, pair);
            for (int k = 0; k < 2; k++) if (fabs(pair[k]) < 2.0 && n_found < GROUP) values[n_found++] = pair[k];
#else
            for (int half = 0; half < 2; half++) {
                float pair[2];
                normal_pair(w.at[2 * half], w.at[2 * half + 1], pair);
                for (int k = 0; k < 2; k++)
                    if (fabsf(pair[k]) < 2.0f && n_found < GROUP) values[n_found++] = Narrow<T>::from(pair[k]);
            }
#endif
        }
#endif
        for (int k = 0; k < GROUP; k++) if (g * GROUP + k < n) out[g * GROUP + k] = values[k];
    }
}
