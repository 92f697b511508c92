// Copies elements from one strided view to another. E is as many bytes as can be moved at once.
struct Sizes { i64 at[8]; };

extern "C" __global__ void KOLO_ENTRY(const E* in, E* out, i64 n, i64 in_start, i64 out_start,
                                      Sizes sizes, Sizes in_steps, Sizes out_steps) {
    for (i64 i = thread_number(); i < n; i += n_threads()) {
        i64 rest = i, from = in_start, to = out_start;
        #pragma unroll
        for (int d = RANK - 1; d >= 0; d--) {
            i64 c;
            if (d == 0) c = rest;
            else if (n < 0x7fffffff) { u32 s = (u32)sizes.at[d], r = (u32)rest; c = r % s; rest = r / s; }
            else { c = rest % sizes.at[d]; rest /= sizes.at[d]; }
            from += c * in_steps.at[d];
            to += c * out_steps.at[d];
        }
        out[to] = in[from];
    }
}
