// out[n, k] = W[n, k] as half, for prompt-size products through MLX's own matmul (simdgroup matrices).
//
// Threads: one per part of 32 weights. Template: K, N. Grid: N * K / 32 threads.
constexpr uint PARTS = BLOCK / 32;
constexpr uint LENGTH = 32 / RUNS;
const uint p = thread_position_in_grid.x;
const uint row = p / (K / 32), block = p % (K / 32) / PARTS, part = p % PARTS;
float weights[32];
unpack(w + (ulong(row) * (K / BLOCK) + block) * BYTES, part, weights);
device half* to = out + ulong(row) * K + block * BLOCK;
#pragma unroll
for (uint run = 0; run < RUNS; run++) {
#pragma unroll
  for (uint i = 0; i < LENGTH; i++) to[run_start(part, run) + i] = half(weights[run * LENGTH + i]);
}
