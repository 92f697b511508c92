// Attention on the matrix units, for halves and heads of HD numbers. A warp keeps MT times 16 rows of its side in registers;
// the other side comes by in tiles of shared memory, the next one on its way while one is used. Scores are never stored.
// The text before this defines T, IS_BF16, HD, WARPS, MT, TILE, BLOCKS (how many should share a multiprocessor), CAUSAL and KIND.
//
// Fragments of mma.m16n8k16: with g = lane / 4 and t = lane % 4, the left side has rows g and g + 8, columns 2t, 2t + 1 and
// those 8 further; the right side has column g, rows 2t, 2t + 1 and those 8 further; the sum has rows g and g + 8, columns
// 2t and 2t + 1. So two sums side by side are a left side.

#define LOG2_E 1.4426950408889634f
#define PIECES (HD / 8)
#define ROWS (WARPS * MT * 16)
#define THREADS (WARPS * 32)
#define INFINITE __int_as_float(0x7f800000)

__device__ __forceinline__ u32 pack(float low, float high) {
    u32 both;
#if IS_BF16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#endif
    return both;
}

__device__ __forceinline__ float power2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if IS_BF16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Where 16 bytes of a tile are: rows are rotated so that eight rows of one column lie in different banks.
__device__ __forceinline__ u32 piece(int row, int column) {
    const int turned = PIECES >= 8 ? column ^ (row & 7) : column ^ ((row >> 1) & 3);
    return (u32)(row * PIECES + turned) * 16;
}

// Begins to copy TILE rows; those from `valid` on become zeros.
__device__ __forceinline__ void fetch(u32 to, const T* from, i64 stride, int valid) {
    #pragma unroll
    for (int i = threadIdx.x; i < TILE * PIECES; i += THREADS) {
        const int row = i / PIECES, column = i % PIECES;
        const int n_bytes = row < valid ? 16 : 0;
        const T* at = row < valid ? from + row * stride + column * 8 : from;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to + piece(row, column)), "l"(at), "r"(n_bytes));
    }
}

__device__ __forceinline__ void fetch_floats(u32 to, const float* from, int valid) {
    for (int i = threadIdx.x; i < TILE; i += THREADS) {
        const int n_bytes = i < valid ? 4 : 0;
        const float* at = i < valid ? from + i : from;
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" :: "r"(to + i * 4), "l"(at), "r"(n_bytes));
    }
}

__device__ __forceinline__ void fetched() { asm volatile("cp.async.commit_group;"); }

__device__ __forceinline__ void wait_for_tile() {
    asm volatile("cp.async.wait_group 0;");
    __syncthreads();
}

// Right sides for 16 columns: of a tile whose rows are the product's columns, 16 of their numbers from piece 2k.
__device__ __forceinline__ void right_of_rows(u32 (&b)[4], u32 tile, int rows, int k) {
    const int lane = threadIdx.x % 32;
    const u32 at = tile + piece(rows + lane / 16 * 8 + lane % 8, 2 * k + (lane / 8 & 1));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(at));
}

// Right sides for 16 columns: of a tile whose rows are the product's inner dimension, 16 of them, columns from piece 2n.
__device__ __forceinline__ void right_of_columns(u32 (&b)[4], u32 tile, int rows, int n) {
    const int lane = threadIdx.x % 32;
    const u32 at = tile + piece(rows + (lane / 8 & 1) * 8 + lane % 8, 2 * n + lane / 16);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(at));
}

// 16 rows in memory as a left side; those from `limit` on are zeros.
__device__ __forceinline__ void left(u32 (&a)[HD / 16][4], const T* from, i64 stride, int row, int limit) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    #pragma unroll
    for (int k = 0; k < HD / 16; k++)
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            const int r = row + g + (i & 1) * 8, c = k * 16 + t * 2 + (i >> 1) * 8;
            a[k][i] = r < limit ? *(const u32*)(from + r * stride + c) : 0u;
        }
}

// 16 rows of sums to memory, times a factor for each of the two rows.
__device__ __forceinline__ void store(T* to, i64 stride, int row, int limit, const float (&sums)[HD / 8][4], float f0, float f1) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    #pragma unroll
    for (int n = 0; n < HD / 8; n++) {
        T* at = to + (row + g) * stride + n * 8 + t * 2;
        if (row + g < limit) *(u32*)at = pack(sums[n][0] * f0, sums[n][1] * f0);
        if (row + g + 8 < limit) *(u32*)(at + 8 * stride) = pack(sums[n][2] * f1, sums[n][3] * f1);
    }
}

__device__ __forceinline__ u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }

#if KIND == 0
// The values that queries see, and the logarithm of each query's sum of exponentials.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) KOLO_ENTRY(const T* qkv, T* y, float* lse, i64 long_length, i64 heads,
                                                                 i64 n_blocks, float scale) {
    __shared__ alignas(128) u8 memory[2][2][TILE * HD * 2];
    const int length = (int)long_length;
    // The longest rows first: they have the most to do.
    const int from = (int)(n_blocks - 1 - blockIdx.x % n_blocks) * ROWS;
    const i64 which = blockIdx.x / n_blocks, batch = which / heads, head = which % heads;
    const i64 width = heads * HD, stride = 3 * width;
    const T* queries = qkv + batch * length * stride + head * HD;
    const T* keys = queries + width;
    const T* values = keys + width;
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int row = from + warp * MT * 16;
    const float scale2 = scale * LOG2_E;
    u32 q[MT][HD / 16][4];
    float o[MT][HD / 8][4], top[MT][2], sum[MT][2];
    #pragma unroll
    for (int m = 0; m < MT; m++) {
        left(q[m], queries, stride, row + m * 16, length);
        top[m][0] = top[m][1] = -INFINITE;
        sum[m][0] = sum[m][1] = 0;
        #pragma unroll
        for (int n = 0; n < HD / 8; n++)
            #pragma unroll
            for (int i = 0; i < 4; i++) o[m][n][i] = 0;
    }
    const int end = CAUSAL && from + ROWS < length ? from + ROWS : length;
    const int n_tiles = (end + TILE - 1) / TILE;
    fetch(shared_address(memory[0][0]), keys, stride, length);
    fetch(shared_address(memory[0][1]), values, stride, length);
    fetched();
    for (int tile = 0; tile < n_tiles; tile++) {
        const int first = tile * TILE;
        wait_for_tile();
        if (tile + 1 < n_tiles) {
            const int next = first + TILE;
            fetch(shared_address(memory[(tile + 1) & 1][0]), keys + next * stride, stride, length - next);
            fetch(shared_address(memory[(tile + 1) & 1][1]), values + next * stride, stride, length - next);
            fetched();
        }
        if (CAUSAL && first > row + MT * 16 - 1) continue;
        const u32 key_tile = shared_address(memory[tile & 1][0]), value_tile = shared_address(memory[tile & 1][1]);
        float s[MT][TILE / 8][4];
        #pragma unroll
        for (int m = 0; m < MT; m++)
            #pragma unroll
            for (int n = 0; n < TILE / 8; n++)
                #pragma unroll
                for (int i = 0; i < 4; i++) s[m][n][i] = 0;
        #pragma unroll
        for (int k = 0; k < HD / 16; k++)
            #pragma unroll
            for (int n = 0; n < TILE / 16; n++) {
                u32 b[4];
                right_of_rows(b, key_tile, n * 16, k);
                #pragma unroll
                for (int m = 0; m < MT; m++) {
                    multiply(s[m][2 * n], q[m][k], b[0], b[1]);
                    multiply(s[m][2 * n + 1], q[m][k], b[2], b[3]);
                }
            }
        if ((CAUSAL && first + TILE - 1 > row) || first + TILE > length) {
            #pragma unroll
            for (int m = 0; m < MT; m++)
                #pragma unroll
                for (int n = 0; n < TILE / 8; n++)
                    #pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const int key = first + n * 8 + t * 2 + (i & 1), query = row + m * 16 + g + (i >> 1) * 8;
                        if (key >= length || (CAUSAL && key > query)) s[m][n][i] = -INFINITE;
                    }
        }
        #pragma unroll
        for (int m = 0; m < MT; m++)
            #pragma unroll
            for (int r = 0; r < 2; r++) {
                float most = top[m][r];
                #pragma unroll
                for (int n = 0; n < TILE / 8; n++) most = fmaxf(most, fmaxf(s[m][n][2 * r], s[m][n][2 * r + 1]));
                most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
                most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
                const float shift = most == -INFINITE ? 0.0f : most * scale2;
                const float fade = power2(top[m][r] * scale2 - shift);
                top[m][r] = most;
                float part = 0;
                #pragma unroll
                for (int n = 0; n < TILE / 8; n++)
                    #pragma unroll
                    for (int i = 2 * r; i < 2 * r + 2; i++) {
                        s[m][n][i] = power2(s[m][n][i] * scale2 - shift);
                        part += s[m][n][i];
                    }
                sum[m][r] = sum[m][r] * fade + part;
                #pragma unroll
                for (int n = 0; n < HD / 8; n++) { o[m][n][2 * r] *= fade; o[m][n][2 * r + 1] *= fade; }
            }
        #pragma unroll
        for (int k = 0; k < TILE / 16; k++) {
            u32 p[MT][4];
            #pragma unroll
            for (int m = 0; m < MT; m++) {
                p[m][0] = pack(s[m][2 * k][0], s[m][2 * k][1]);
                p[m][1] = pack(s[m][2 * k][2], s[m][2 * k][3]);
                p[m][2] = pack(s[m][2 * k + 1][0], s[m][2 * k + 1][1]);
                p[m][3] = pack(s[m][2 * k + 1][2], s[m][2 * k + 1][3]);
            }
            #pragma unroll
            for (int n = 0; n < HD / 16; n++) {
                u32 b[4];
                right_of_columns(b, value_tile, k * 16, n);
                #pragma unroll
                for (int m = 0; m < MT; m++) {
                    multiply(o[m][2 * n], p[m], b[0], b[1]);
                    multiply(o[m][2 * n + 1], p[m], b[2], b[3]);
                }
            }
        }
    }
    #pragma unroll
    for (int m = 0; m < MT; m++) {
        float factor[2];
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            float total = sum[m][r];
            total += __shfl_xor_sync(0xffffffffu, total, 1);
            total += __shfl_xor_sync(0xffffffffu, total, 2);
            factor[r] = 1.0f / total;
            const int query = row + m * 16 + g + r * 8;
            if (t == 0 && query < length) lse[which * length + query] = top[m][r] * scale + logf(total);
        }
        store(y + batch * length * width + head * HD, width, row + m * 16, length, o[m], factor[0], factor[1]);
    }
}
#elif KIND == 1
// For each query the product of its output and the output's gradient.
extern "C" __global__ void KOLO_ENTRY(const T* y, const T* dy, float* delta, i64 n, i64 length, i64 heads) {
    for (i64 i = thread_number(); i < n; i += n_threads()) {
        const Pack<T, 8> a = ((const Pack<T, 8>*)y)[i], b = ((const Pack<T, 8>*)dy)[i];
        float sum = 0;
        #pragma unroll
        for (int j = 0; j < 8; j++) sum += widen(a.at[j]) * widen(b.at[j]);
        // n is a multiple of PIECES, so all lanes that share a query are here.
        const u32 group = ((1u << PIECES) - 1u) << (threadIdx.x % 32 / PIECES * PIECES);
        #pragma unroll
        for (int by = PIECES / 2; by > 0; by /= 2) sum += __shfl_xor_sync(group, sum, by);
        const i64 row = i / PIECES;
        if (i % PIECES == 0) {
            const i64 head = row % heads, place = row / heads;
            delta[(place / length * heads + head) * length + place % length] = sum;
        }
    }
}
#elif KIND == 2
// The gradient of the queries.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) KOLO_ENTRY(const T* qkv, const T* dy, const float* lse,
                                                                 const float* delta, T* dqkv, i64 long_length, i64 heads,
                                                                 i64 n_blocks, float scale) {
    __shared__ alignas(128) u8 memory[2][2][TILE * HD * 2];
    const int length = (int)long_length;
    const int from = (int)(n_blocks - 1 - blockIdx.x % n_blocks) * ROWS;
    const i64 which = blockIdx.x / n_blocks, batch = which / heads, head = which % heads;
    const i64 width = heads * HD, stride = 3 * width;
    const T* queries = qkv + batch * length * stride + head * HD;
    const T* keys = queries + width;
    const T* values = keys + width;
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int row = from + warp * MT * 16;
    const float scale2 = scale * LOG2_E;
    u32 q[MT][HD / 16][4], d[MT][HD / 16][4];
    float dq[MT][HD / 8][4], shift[MT][2], mean[MT][2];
    #pragma unroll
    for (int m = 0; m < MT; m++) {
        left(q[m], queries, stride, row + m * 16, length);
        left(d[m], dy + batch * length * width + head * HD, width, row + m * 16, length);
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            const int query = row + m * 16 + g + r * 8;
            shift[m][r] = query < length ? lse[which * length + query] * LOG2_E : 0.0f;
            mean[m][r] = query < length ? delta[which * length + query] : 0.0f;
        }
        #pragma unroll
        for (int n = 0; n < HD / 8; n++)
            #pragma unroll
            for (int i = 0; i < 4; i++) dq[m][n][i] = 0;
    }
    const int end = CAUSAL && from + ROWS < length ? from + ROWS : length;
    const int n_tiles = (end + TILE - 1) / TILE;
    fetch(shared_address(memory[0][0]), keys, stride, length);
    fetch(shared_address(memory[0][1]), values, stride, length);
    fetched();
    for (int tile = 0; tile < n_tiles; tile++) {
        const int first = tile * TILE;
        wait_for_tile();
        if (tile + 1 < n_tiles) {
            const int next = first + TILE;
            fetch(shared_address(memory[(tile + 1) & 1][0]), keys + next * stride, stride, length - next);
            fetch(shared_address(memory[(tile + 1) & 1][1]), values + next * stride, stride, length - next);
            fetched();
        }
        const u32 key_tile = shared_address(memory[tile & 1][0]), value_tile = shared_address(memory[tile & 1][1]);
        // Sixteen keys at a time, so that few scores are held.
        #pragma unroll
        for (int slice = 0; slice < TILE / 16; slice++) {
            const int key0 = first + slice * 16;
            if ((CAUSAL && key0 > row + MT * 16 - 1) || key0 >= length) continue;
            float s[MT][2][4], dp[MT][2][4];
            #pragma unroll
            for (int m = 0; m < MT; m++)
                #pragma unroll
                for (int i = 0; i < 8; i++) { s[m][i / 4][i % 4] = 0; dp[m][i / 4][i % 4] = 0; }
            #pragma unroll
            for (int k = 0; k < HD / 16; k++) {
                u32 b[4], c[4];
                right_of_rows(b, key_tile, slice * 16, k);
                right_of_rows(c, value_tile, slice * 16, k);
                #pragma unroll
                for (int m = 0; m < MT; m++) {
                    multiply(s[m][0], q[m][k], b[0], b[1]);
                    multiply(s[m][1], q[m][k], b[2], b[3]);
                    multiply(dp[m][0], d[m][k], c[0], c[1]);
                    multiply(dp[m][1], d[m][k], c[2], c[3]);
                }
            }
            const bool masks = (CAUSAL && key0 + 15 > row) || key0 + 16 > length;
            u32 ds[MT][4];
            #pragma unroll
            for (int m = 0; m < MT; m++) {
                #pragma unroll
                for (int n = 0; n < 2; n++)
                    #pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const int key = key0 + n * 8 + t * 2 + (i & 1), query = row + m * 16 + g + (i >> 1) * 8;
                        float p = power2(s[m][n][i] * scale2 - shift[m][i >> 1]);
                        if (masks && (key >= length || (CAUSAL && key > query))) p = 0;
                        s[m][n][i] = p * (dp[m][n][i] - mean[m][i >> 1]);
                    }
                ds[m][0] = pack(s[m][0][0], s[m][0][1]);
                ds[m][1] = pack(s[m][0][2], s[m][0][3]);
                ds[m][2] = pack(s[m][1][0], s[m][1][1]);
                ds[m][3] = pack(s[m][1][2], s[m][1][3]);
            }
            #pragma unroll
            for (int n = 0; n < HD / 16; n++) {
                u32 b[4];
                right_of_columns(b, key_tile, slice * 16, n);
                #pragma unroll
                for (int m = 0; m < MT; m++) {
                    multiply(dq[m][2 * n], ds[m], b[0], b[1]);
                    multiply(dq[m][2 * n + 1], ds[m], b[2], b[3]);
                }
            }
        }
    }
    #pragma unroll
    for (int m = 0; m < MT; m++)
        store(dqkv + batch * length * stride + head * HD, stride, row + m * 16, length, dq[m], scale, scale);
}
#elif KIND == 3
// The gradients of keys and values. Scores are turned, so that rows are keys.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) KOLO_ENTRY(const T* qkv, const T* dy, const float* lse,
                                                                 const float* delta, T* dqkv, i64 long_length, i64 heads,
                                                                 i64 n_blocks, float scale) {
    __shared__ alignas(128) u8 memory[2][2][TILE * HD * 2];
    __shared__ alignas(16) float rows[2][2][TILE];
    const int length = (int)long_length;
    const int from = (int)(blockIdx.x % n_blocks) * ROWS;
    const i64 which = blockIdx.x / n_blocks, batch = which / heads, head = which % heads;
    const i64 width = heads * HD, stride = 3 * width;
    const T* queries = qkv + batch * length * stride + head * HD;
    const T* grads = dy + batch * length * width + head * HD;
    const float* shifts = lse + which * length;
    const float* means = delta + which * length;
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int row = from + warp * MT * 16;
    const float scale2 = scale * LOG2_E;
    u32 k[MT][HD / 16][4], v[MT][HD / 16][4];
    float dk[MT][HD / 8][4], dv[MT][HD / 8][4];
    #pragma unroll
    for (int m = 0; m < MT; m++) {
        left(k[m], queries + width, stride, row + m * 16, length);
        left(v[m], queries + 2 * width, stride, row + m * 16, length);
        #pragma unroll
        for (int n = 0; n < HD / 8; n++)
            #pragma unroll
            for (int i = 0; i < 4; i++) { dk[m][n][i] = 0; dv[m][n][i] = 0; }
    }
    const int n_tiles = (length + TILE - 1) / TILE, begin = CAUSAL ? from / TILE : 0;
    #define FETCH(stage, at)                                                                                 \
        fetch(shared_address(memory[stage][0]), queries + (at) * stride, stride, length - (at));               \
        fetch(shared_address(memory[stage][1]), grads + (at) * width, width, length - (at));                   \
        fetch_floats(shared_address(rows[stage][0]), shifts + (at), length - (at));                            \
        fetch_floats(shared_address(rows[stage][1]), means + (at), length - (at));                             \
        fetched();
    FETCH(begin & 1, begin * TILE)
    for (int tile = begin; tile < n_tiles; tile++) {
        const int first = tile * TILE, stage = tile & 1;
        wait_for_tile();
        if (tile + 1 < n_tiles) { FETCH(stage ^ 1, first + TILE) }
        const u32 query_tile = shared_address(memory[stage][0]), grad_tile = shared_address(memory[stage][1]);
        // Sixteen queries at a time.
        #pragma unroll
        for (int slice = 0; slice < TILE / 16; slice++) {
            const int query0 = first + slice * 16;
            if ((CAUSAL && query0 + 15 < row) || query0 >= length) continue;
            float s[MT][2][4], dp[MT][2][4];
            #pragma unroll
            for (int m = 0; m < MT; m++)
                #pragma unroll
                for (int i = 0; i < 8; i++) { s[m][i / 4][i % 4] = 0; dp[m][i / 4][i % 4] = 0; }
            #pragma unroll
            for (int j = 0; j < HD / 16; j++) {
                u32 b[4], c[4];
                right_of_rows(b, query_tile, slice * 16, j);
                right_of_rows(c, grad_tile, slice * 16, j);
                #pragma unroll
                for (int m = 0; m < MT; m++) {
                    multiply(s[m][0], k[m][j], b[0], b[1]);
                    multiply(s[m][1], k[m][j], b[2], b[3]);
                    multiply(dp[m][0], v[m][j], c[0], c[1]);
                    multiply(dp[m][1], v[m][j], c[2], c[3]);
                }
            }
            const bool masks = CAUSAL && query0 < row + MT * 16 - 1;
            u32 p[MT][4], ds[MT][4];
            #pragma unroll
            for (int n = 0; n < 2; n++) {
                const float2 shift = *(const float2*)&rows[stage][0][slice * 16 + n * 8 + t * 2];
                const float2 mean = *(const float2*)&rows[stage][1][slice * 16 + n * 8 + t * 2];
                #pragma unroll
                for (int m = 0; m < MT; m++)
                    #pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const int query = query0 + n * 8 + t * 2 + (i & 1), key = row + m * 16 + g + (i >> 1) * 8;
                        float share = power2(s[m][n][i] * scale2 - ((i & 1) ? shift.y : shift.x) * LOG2_E);
                        if (masks && key > query) share = 0;
                        s[m][n][i] = share;
                        dp[m][n][i] = share * (dp[m][n][i] - ((i & 1) ? mean.y : mean.x));
                    }
                #pragma unroll
                for (int m = 0; m < MT; m++) {
                    p[m][2 * n] = pack(s[m][n][0], s[m][n][1]);
                    p[m][2 * n + 1] = pack(s[m][n][2], s[m][n][3]);
                    ds[m][2 * n] = pack(dp[m][n][0], dp[m][n][1]);
                    ds[m][2 * n + 1] = pack(dp[m][n][2], dp[m][n][3]);
                }
            }
            #pragma unroll
            for (int n = 0; n < HD / 16; n++) {
                u32 b[4], c[4];
                right_of_columns(b, grad_tile, slice * 16, n);
                right_of_columns(c, query_tile, slice * 16, n);
                #pragma unroll
                for (int m = 0; m < MT; m++) {
                    multiply(dv[m][2 * n], p[m], b[0], b[1]);
                    multiply(dv[m][2 * n + 1], p[m], b[2], b[3]);
                    multiply(dk[m][2 * n], ds[m], c[0], c[1]);
                    multiply(dk[m][2 * n + 1], ds[m], c[2], c[3]);
                }
            }
        }
    }
    T* out = dqkv + batch * length * stride + head * HD;
    #pragma unroll
    for (int m = 0; m < MT; m++) {
        store(out + width, stride, row + m * 16, length, dk[m], scale, scale);
        store(out + 2 * width, stride, row + m * 16, length, dv[m], 1.0f, 1.0f);
    }
}
#endif
