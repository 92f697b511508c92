// Joins the parts of a reduction, always in the same order.
extern "C" __global__ void KOLO_ENTRY(const A* partial, U* out, i64 n_out, i64 n_parts, i64 n_in) {
    for (i64 which = thread_number(); which < n_out; which += n_threads()) {
        A acc = START;
        for (i64 part = 0; part < n_parts; part++) { A other = partial[part * n_out + which]; acc = JOIN(acc, other); }
        out[which] = Narrow<U>::from(FINISH(acc, n_in));
    }
}
