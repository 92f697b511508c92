// Copies between many pairs of buffers. blockIdx.y is the pair; the blocks of a pair share its bytes.

struct Copies {
    struct { u64 from, to; } at[PAIRS];
    i64 n_bytes[PAIRS];
};

extern "C" __global__ void KOLO_ENTRY(Copies copies) {
    const u8* from = (const u8*)copies.at[blockIdx.y].from;
    u8* to = (u8*)copies.at[blockIdx.y].to;
    i64 n = copies.n_bytes[blockIdx.y];
    i64 done = 0;
    // Views may begin at any element.
    if ((((u64)from | (u64)to) & 15) == 0) {
        typedef Pack<u32, 4> Wide16;
        i64 n_wide = n / 16;
        for (i64 i = thread_number(); i < n_wide; i += n_threads()) ((Wide16*)to)[i] = ((const Wide16*)from)[i];
        done = n_wide * 16;
    }
    for (i64 i = done + thread_number(); i < n; i += n_threads()) to[i] = from[i];
}
