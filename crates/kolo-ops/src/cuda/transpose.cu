// Transposes matrices of a batch through shared memory, so that both sides are read and written in rows.
#define TILE 32
extern "C" __global__ void KOLO_ENTRY(const E* in, E* out, i64 rows, i64 columns, i64 in_batch, i64 in_row, i64 batch) {
    __shared__ E tile[TILE][TILE + 1];
    const i64 tiles_x = (columns + TILE - 1) / TILE, tiles_y = (rows + TILE - 1) / TILE;
    for (i64 job = blockIdx.x; job < tiles_x * tiles_y * batch; job += gridDim.x) {
        const i64 which = job / (tiles_x * tiles_y), at = job % (tiles_x * tiles_y);
        const i64 x0 = (at % tiles_x) * TILE, y0 = (at / tiles_x) * TILE;
        // The input is columns × rows: row y of the output is column y there.
        for (int k = threadIdx.y; k < TILE; k += 8) {
            const i64 x = x0 + k, y = y0 + threadIdx.x;
            if (x < columns && y < rows) tile[k][threadIdx.x] = in[which * in_batch + x * in_row + y];
        }
        __syncthreads();
        for (int k = threadIdx.y; k < TILE; k += 8) {
            const i64 y = y0 + k, x = x0 + threadIdx.x;
            if (x < columns && y < rows) out[(which * rows + y) * columns + x] = tile[threadIdx.x][k];
        }
        __syncthreads();
    }
}
