// Batch norm in one launch: a block keeps on the chip what fits of the values that it sums, and reads only the others again. A
// tensor is a matrix here, whose columns are channels, or `inner` pixels of each channel where those come first. A block has
// `wide` neighbouring packs of columns, all of their channels, and a part of the rows that depends on blockIdx.y. The text before
// this defines T, WIDTH, FIRST (channels come first) and KIND: forward (0) or backward (1).

typedef Pack<T, WIDTH> P;
typedef Pack<float, 4> Four;
enum { TENSORS = KIND + 1, AHEAD = 8 / TENSORS };

// Starts a copy from global to shared memory; `arrive` waits for all that this thread started.
__device__ __forceinline__ void fetch(P* to, const P* from) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory");
#else
    *to = *from;
#endif
}
__device__ __forceinline__ void arrive() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Stores a pack at once, which the compiler does not see by itself; `is_passing` if what is near should not make room for it.
__device__ __forceinline__ void store(T* to, const P& value, bool is_passing) {
    const uint4 bits = *(const uint4*)&value;
    if (is_passing) __stcs((uint4*)to, bits);
    else __stwb((uint4*)to, bits);
}

#if !FIRST
// Waits until all blocks are here. The highest bit changes when the last one comes, and the others are as before then.
__device__ u32 arrivals;
__device__ __forceinline__ void meet() {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        const u32 others = gridDim.x * gridDim.y - 1;
        const u32 before = atomicAdd(&arrivals, blockIdx.x + blockIdx.y == 0 ? 0x80000000u - others : 1u);
        while (((before ^ *(volatile u32*)&arrivals) & 0x80000000u) == 0) {}
        __threadfence();
    }
    __syncthreads();
}
#endif

// Adds up `n` rows of numbers, `stride` apart, to one for each channel, in a fixed order. A row has a number for each of the
// block's columns, and `more` numbers after those another row of them if `both`.
__device__ __forceinline__ void join(const float* from, u32 n, i64 stride, u32 columns, u32 inner, i64 more, bool both,
                                     float* scratch, float* to) {
#if FIRST
    for (u32 column = threadIdx.x; column < columns; column += blockDim.x) {
        float sum = 0;
        for (u32 i = 0; i < n; i++) sum += from[i * stride + column];
        scratch[column] = sum;
    }
    __syncthreads();
    for (u32 c = threadIdx.x / 32; c < columns / inner; c += blockDim.x / 32) {
        float sum = 0;
        for (u32 i = threadIdx.x % 32; i < inner; i += 32) sum += scratch[c * inner + i];
        #pragma unroll
        for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, by);
        if (threadIdx.x % 32 == 0) to[c] = sum;
    }
#else
    const u32 all = both ? 2 * columns : columns, slices = blockDim.x / all;
    const u32 slice = threadIdx.x / all, column = threadIdx.x % all;
    from += column < columns ? column : column + more;
    float sum = 0;
    #pragma unroll 1
    for (u32 i = slice; i < n; i += slices * 8) {
        float few[8];
        #pragma unroll
        for (u32 j = 0; j < 8; j++) few[j] = slice < slices && i + j * slices < n ? from[(i + j * slices) * stride] : 0.0f;
        #pragma unroll
        for (int j = 0; j < 8; j++) sum += few[j];
    }
    __syncthreads();
    if (slice < slices) scratch[threadIdx.x] = sum;
    __syncthreads();
    if (slice == 0) {
        #pragma unroll 1
        for (u32 i = 1; i < slices; i++) sum += scratch[i * all + column];
        to[column] = sum;
    }
#endif
    __syncthreads();
}

// Adds what a pack has to the sums: of x and x² relative to `m` (0); of dy and dy · (x - m) (1).
__device__ __forceinline__ void add(const P& value, const P& grad, const float* m, float* a, float* b) {
    #pragma unroll
    for (int j = 0; j < WIDTH; j++) {
        const float v = widen(value.at[j]) - m[j], g = KIND ? widen(grad.at[j]) : v;
        a[j] += g;
        b[j] += g * v;
    }
}

// `in_a` and `in_b` are the old averages (0), or mean and variance (1); the four outputs are mean and variance and the new averages
// (0), or the first two are the gradients by scale and offset (1). `share` is one over the elements of a channel if mean and
// variance depend on them, else 0. `parts` has room for two numbers of each channel and block below each other.
extern "C" __global__ void __launch_bounds__(512)
KOLO_ENTRY(const T* __restrict__ x, const T* __restrict__ dy, const float* scale, const float* offset, const float* in_a,
           const float* in_b, T* __restrict__ out, float* out_a, float* out_b, float* new_a, float* new_b, float* zero,
           float* parts, i64 rows, i64 channels, i64 inner_size, i64 wide_size, i64 held, float n, float factor, float epsilon,
           float share) {
    extern __shared__ P memory[];
    const u32 threads = blockDim.x, inner = (u32)inner_size, wide = (u32)wide_size, span = wide * WIDTH;
    const u32 tall = threads / wide, down = threadIdx.x / wide, at = threadIdx.x % wide * WIDTH;
    const i64 columns = channels * inner, begin = (i64)blockIdx.x * span;
    const u32 here = (u32)(columns - begin < span ? columns - begin : span), n_channels = here / inner;
    const i64 channel = (i64)blockIdx.x * (span / inner);
    const u32 step = gridDim.y * tall, top = blockIdx.y * tall + down;
    const bool is_in = down < tall && at < here;
    const u32 n_packs = is_in && top < rows ? ((u32)rows - top + step - 1) / step : 0;
    const u32 n_held = n_packs < held ? n_packs : (u32)held;
    P* mine = memory + threadIdx.x;
    float* scratch = (float*)(memory + held * TENSORS * threads);
    float* sums = scratch + tall * span;

    const i64 start = top * columns + begin + at, stride = step * columns;
    #pragma unroll 4
    for (u32 k = 0; k < n_held; k++) {
        fetch(mine + k * TENSORS * threads, (const P*)(x + start + k * stride));
        if (KIND) fetch(mine + (k * TENSORS + 1) * threads, (const P*)(dy + start + k * stride));
    }
    float a[WIDTH], b[WIDTH], m[WIDTH];
    #pragma unroll
    for (int j = 0; j < WIDTH; j++) {
        const i64 c = channel + (FIRST ? (at + j) / inner : at + j);
        a[j] = b[j] = 0;
        m[j] = !is_in ? 0.0f : KIND ? in_a[c] : widen(x[c * inner]);
    }
    for (u32 k = n_held; k < n_packs; k += AHEAD) {
        P value[AHEAD], grad[AHEAD];
        #pragma unroll
        for (u32 i = 0; i < AHEAD; i++)
            if (k + i < n_packs) {
                value[i] = *(const P*)(x + start + (k + i) * stride);
                if (KIND) grad[i] = *(const P*)(dy + start + (k + i) * stride);
            }
        #pragma unroll
        for (u32 i = 0; i < AHEAD; i++)
            if (k + i < n_packs) add(value[i], grad[i], m, a, b);
    }
    arrive();
    #pragma unroll 2
    for (u32 k = 0; k < n_held; k++)
        add(mine[k * TENSORS * threads], mine[(k * TENSORS + TENSORS - 1) * threads], m, a, b);

    #pragma unroll 1
    for (int which = 0; which < 2; which++) {
        #pragma unroll
        for (int j = 0; j < WIDTH; j += 4) {
            const Four sum = which ? Four{b[j], b[j + 1], b[j + 2], b[j + 3]} : Four{a[j], a[j + 1], a[j + 2], a[j + 3]};
            if (down < tall) *(Four*)(scratch + down * span + at + j) = sum;
        }
        __syncthreads();
        join(scratch, tall, span, here, inner, 0, false, scratch, sums + which * n_channels);
    }
#if !FIRST
    if (gridDim.y > 1) {
        if (threadIdx.x < n_channels)
            for (int which = 0; which < 2; which++)
                parts[(i64)(which * gridDim.y + blockIdx.y) * channels + channel + threadIdx.x] =
                    sums[which * n_channels + threadIdx.x];
        meet();
        join(parts + channel, gridDim.y, channels, here, inner, (i64)gridDim.y * channels - here, true, scratch, sums);
    }
#endif
    // Each thread ends the sums of one channel: what its values are multiplied by and have added takes their place.
    if (threadIdx.x < n_channels) {
        const i64 c = channel + threadIdx.x;
        const float first = sums[threadIdx.x], second = sums[n_channels + threadIdx.x];
#if KIND == 0
        const Moments of = moments(first, second, widen(x[c * inner]), n);
        const float by = scale[c] / sqrtf(of.variance + epsilon);
        sums[threadIdx.x] = by;
        sums[n_channels + threadIdx.x] = offset[c] - of.mean * by;
        if (blockIdx.y == 0) {
            keep(of, n, factor, in_a, in_b, c, out_a, out_b, new_a, new_b);
            if (c == 0) *zero = 0;
        }
#else
        const Slope of = slope_of(first, second, scale[c], in_a[c], in_b[c], epsilon, share);
        sums[threadIdx.x] = of.by;
        sums[n_channels + threadIdx.x] = of.slope;
        sums[2 * n_channels + threadIdx.x] = of.plus;
        if (blockIdx.y == 0) {
            out_a[c] = of.scale_grad;
            out_b[c] = first;
        }
#endif
    }
    __syncthreads();
    float by[WIDTH], plus[WIDTH], slope[WIDTH];
    #pragma unroll
    for (int j = 0; j < WIDTH; j++) {
        const u32 c = is_in ? (FIRST ? (at + j) / inner : at + j) : 0;
        by[j] = sums[c];
        slope[j] = sums[n_channels + c];
        plus[j] = sums[TENSORS * n_channels + c];
    }
    auto normalised = [&](P value, const P& grad) {
        #pragma unroll
        for (int j = 0; j < WIDTH; j++)
            value.at[j] = Narrow<T>::from(KIND ? widen(grad.at[j]) * by[j] + widen(value.at[j]) * slope[j] + plus[j]
                                               : widen(value.at[j]) * by[j] + plus[j]);
        return value;
    };
    // From the last to the first: what was read last is still near, and what is written now should not push it out.
    for (u32 k = 0; k < n_packs - n_held; k += AHEAD) {
        P value[AHEAD], grad[AHEAD];
        const i64 end = start + (i64)(n_packs - 1 - k) * stride;
        #pragma unroll
        for (u32 i = 0; i < AHEAD; i++)
            if (k + i < n_packs - n_held) {
                value[i] = *(const P*)(x + end - i * stride);
                if (KIND) grad[i] = *(const P*)(dy + end - i * stride);
            }
        #pragma unroll
        for (u32 i = 0; i < AHEAD; i++)
            if (k + i < n_packs - n_held) store(out + end - i * stride, normalised(value[i], grad[i]), true);
    }
    #pragma unroll 2
    for (u32 k = n_held; k > 0; k--) {
        const P value = mine[(k - 1) * TENSORS * threads], grad = mine[(k * TENSORS - 1) * threads];
        store(out + start + (k - 1) * stride, normalised(value, grad), false);
    }
}
