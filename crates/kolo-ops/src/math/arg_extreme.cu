// The place of the largest or smallest value along an axis; the first of equals, or 0 if none is better than WORST, as NaN
// never is. A warp for each.
extern "C" __global__ void KOLO_ENTRY(const T* in, U* out, i64 n_out, i64 n, i64 inner) {
    const int lane = threadIdx.x % 32;
    const i64 which = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (which >= n_out) return;
    const T* row = in + (which / inner) * n * inner + which % inner;
    W best = WORST;
    i64 found = n;
    for (i64 i = lane; i < n; i += 32) {
        W x = widen(row[i * inner]);
        if (x BETTER best) { best = x; found = i; }
    }
    for (int by = 16; by > 0; by /= 2) {
        i64 other_found = __shfl_down_sync(0xffffffffu, found, by);
        W other;
        if (sizeof(W) == 8) {
            u64 bits = __shfl_down_sync(0xffffffffu, *(u64*)&best, by);
            other = *(W*)&bits;
        } else {
            u32 bits = 0;
            *(W*)&bits = best;
            bits = __shfl_down_sync(0xffffffffu, bits, by);
            other = *(W*)&bits;
        }
        if (other BETTER best || (other == best && other_found < found)) {
            best = other;
            found = other_found;
        }
    }
    if (lane == 0) out[which] = (U)(found < n ? found : 0);
}
