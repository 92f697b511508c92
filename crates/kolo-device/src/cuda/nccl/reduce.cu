// What N_RANKS ranks have given for a share of a vector, combined in the fixed tree over ranks: ((0 + 1) + (2 + 3)) + …. One row is
// this rank's own; the others lie one after the other, with a place left open for it. Sums of halves are made in float and rounded
// once.

struct Rows {
    u64 own, others, out;
};

extern "C" __global__ void KOLO_ENTRY(Rows rows, i64 n, i32 rank) {
    typedef typename Wide<T>::type W;
    const T* own = (const T*)rows.own;
    const T* others = (const T*)rows.others;
    T* out = (T*)rows.out;
    for (i64 i = thread_number(); i < n; i += n_threads()) {
        // A binary counter: level k holds the combination of 2^k neighbours that waits for the next 2^k.
        W waiting[LEVELS];
#pragma unroll UNROLLED
        for (int r = 0; r < N_RANKS; r++) {
            W x = widen(r == rank ? own[i] : others[r * n + i]);
#pragma unroll
            for (int level = 0; level < LEVELS; level++) {
                if (((r >> level) & 1) == 0) {
                    waiting[level] = x;
                    break;
                }
                x = COMBINE(waiting[level], x);
            }
        }
        // What is left of a number that is no power of two, from the smallest group to the largest.
        W sum = W();
        bool is_first = true;
#pragma unroll
        for (int level = 0; level < LEVELS; level++) {
            if ((N_RANKS >> level) & 1) {
                sum = is_first ? waiting[level] : COMBINE(waiting[level], sum);
                is_first = false;
            }
        }
        out[i] = Narrow<T>::from(FINISH(sum));
    }
}
