// out[o, d, i] is on where d is indices[o, i], and off elsewhere.
extern "C" __global__ void KOLO_ENTRY(const I* indices, const E* on, const E* off, E* out, i64 n, i64 depth, i64 inner) {
    const E yes = *on, no = *off;
    for (i64 at = thread_number(); at < n; at += n_threads()) {
        const i64 i = at % inner, d = (at / inner) % depth, o = at / inner / depth;
        out[at] = (i64)indices[o * inner + i] == d ? yes : no;
    }
}
