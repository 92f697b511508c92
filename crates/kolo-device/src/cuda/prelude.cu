// The prelude of every kernel of Kolo. NVRTC has no headers available, so the two half types are bits here, and
// arithmetic on them is done in float, as on the CPU.

typedef signed char i8;
typedef short i16;
typedef int i32;
typedef long long i64;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef float f32;
typedef double f64;

struct f16 { u16 bits; };
struct bf16 { u16 bits; };

__device__ __forceinline__ float widen(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
__device__ __forceinline__ float widen(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ i8 widen(i8 x) { return x; }
__device__ __forceinline__ i16 widen(i16 x) { return x; }
__device__ __forceinline__ i32 widen(i32 x) { return x; }
__device__ __forceinline__ i64 widen(i64 x) { return x; }
__device__ __forceinline__ u8 widen(u8 x) { return x; }
__device__ __forceinline__ u16 widen(u16 x) { return x; }
__device__ __forceinline__ u32 widen(u32 x) { return x; }
__device__ __forceinline__ u64 widen(u64 x) { return x; }
__device__ __forceinline__ bool widen(bool x) { return x; }

// The type for computing with T.
template <typename T> struct Wide { typedef T type; };
template <> struct Wide<f16> { typedef float type; };
template <> struct Wide<bf16> { typedef float type; };

// The type of sums of T.
template <typename T> struct Sum { typedef T type; };
template <> struct Sum<f16> { typedef float type; };
template <> struct Sum<bf16> { typedef float type; };

// Converts a computed value back to T.
template <typename T> struct Narrow {
    template <typename W> static __device__ __forceinline__ T from(W x) { return (T)x; }
};
template <> struct Narrow<f16> {
    static __device__ __forceinline__ f16 from(float x) {
        f16 y;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
        return y;
    }
};
template <> struct Narrow<bf16> {
    static __device__ __forceinline__ bf16 from(float x) {
        bf16 y;
#if __CUDA_ARCH__ >= 800
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
        return y;
#endif
        u32 bits = __float_as_uint(x);
        // Rounds to even; NaN keeps a bit so that it stays NaN.
        if ((bits & 0x7fffffffu) > 0x7f800000u) y.bits = (u16)((bits >> 16) | 0x40u);
        else y.bits = (u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
        return y;
    }
};

template <typename T> __device__ __forceinline__ bool is_nan(T) { return false; }
template <> __device__ __forceinline__ bool is_nan<float>(float x) { return x != x; }
template <> __device__ __forceinline__ bool is_nan<double>(double x) { return x != x; }

template <typename T> __device__ __forceinline__ T larger(T a, T b) { return (a > b || is_nan(a)) ? a : b; }
template <typename T> __device__ __forceinline__ T smaller(T a, T b) { return (a < b || is_nan(a)) ? a : b; }

// N elements that are loaded and stored as one vector.
template <typename T, int N> struct alignas(sizeof(T) * N) Pack { T at[N]; };

__device__ __forceinline__ i64 thread_number() { return (i64)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ __forceinline__ i64 n_threads() { return (i64)gridDim.x * blockDim.x; }

// The derivative of x · gate(x), where gate(x) = 1 / (1 + exp(-2u)) and u = √(2/π) · (x + 0.044715 · x³).
template <typename W> __device__ __forceinline__ W gelu_grad(W dy, W x) {
    const W slope = (W)1.5957691216057307, cube = (W)0.044715;
    W gate = (W)1 / ((W)1 + exp(-slope * x * ((W)1 + cube * x * x)));
    return dy * (gate + x * gate * ((W)1 - gate) * slope * ((W)1 + (W)3 * cube * x * x));
}
