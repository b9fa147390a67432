// y[m, n] = sum over k of W[n, k] x[m, k] for M = 1..8 rows of activations; each weight byte is read and unpacked
// once and used for all M rows. W lies as GGUF blocks; the type's header gives BLOCK, BYTES, RUNS, unpack.
//
// Threads: a simdgroup owns ROWS rows of W; its 32 lanes take the parts (32 weights each) of a row in turn, so the
// lanes together read a row's bytes in order. Registers: 32 weights + ROWS * M sums. No threadgroup memory, no barrier.
// Template: K, N, M, ROWS. Grid: 32 * ceil(N / ROWS) threads; threadgroup: a multiple of 32.
constexpr uint PARTS = BLOCK / 32;
constexpr uint LENGTH = 32 / RUNS;
const uint lane = thread_index_in_simdgroup;
const uint row0 = thread_position_in_grid.x / 32 * ROWS;

float acc[ROWS][M];
for (uint r = 0; r < ROWS; r++) {
  for (uint m = 0; m < M; m++) acc[r][m] = 0.0f;
}
for (uint p = lane; p < uint(K) / 32; p += 32) {
  const uint block = p / PARTS, part = p % PARTS;
  for (uint r = 0; r < ROWS && row0 + r < uint(N); r++) {
    float weights[32];
    unpack(w + (ulong(row0 + r) * (K / BLOCK) + block) * BYTES, part, weights);
    for (uint m = 0; m < M; m++) {
      const device float* xm = x + m * K + block * BLOCK;
      float sum = 0.0f;
      for (uint run = 0; run < RUNS; run++) {
        const device float4* xr = (const device float4*)(xm + run_start(part, run));
        for (uint i = 0; i < LENGTH / 4; i++) {
          const thread float* wr = weights + run * LENGTH + 4 * i;
          sum += dot(float4(wr[0], wr[1], wr[2], wr[3]), xr[i]);
        }
      }
      acc[r][m] += sum;
    }
  }
}
for (uint r = 0; r < ROWS; r++) {
  for (uint m = 0; m < M; m++) {
    const float total = simd_sum(acc[r][m]);
    if (lane == 0 && row0 + r < uint(N)) y[m * N + row0 + r] = total;
  }
}
