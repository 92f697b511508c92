// The place of the largest or smallest value along an axis; the first of equals. NaN is never better. A warp for each.
extern "C" __global__ void KOLO_ENTRY(const T* in, U* out, i64 n_out, i64 n, i64 inner) {
    const int lane = threadIdx.x % 32;
    const i64 which = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (which >= n_out) return;
    const T* row = in + (which / inner) * n * inner + which % inner;
    W best = 0;
    i64 found = -1;
    for (i64 i = lane; i < n; i += 32) {
        W x = widen(row[i * inner]);
        if (!is_nan(x) && (found < 0 || x BETTER best)) { best = x; found = i; }
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
        if (other_found >= 0 && (found < 0 || other BETTER best || (other == best && other_found < found))) {
            best = other;
            found = other_found;
        }
    }
    if (lane == 0) out[which] = (U)(found < 0 ? 0 : found);
}
