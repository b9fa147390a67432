// y[p, n] = sum over k of W[ids[p], n, k] x[p / SHARE, k] for P pairs (token, chosen expert): only the chosen experts'
// rows are read. SHARE is the number of pairs that share a row of x (n_used, or 1 when each pair has its own).
//
// Threads: as matvec.metal with M = 1; grid y is the pair. Template: K, N, SHARE, ROWS.
// Grid: (32 * ceil(N / ROWS), P) threads; threadgroup: (a multiple of 32, 1).
constexpr uint PARTS = BLOCK / 32;
constexpr uint LENGTH = 32 / RUNS;
const uint lane = thread_index_in_simdgroup;
const uint row0 = thread_position_in_grid.x / 32 * ROWS;
const uint pair = thread_position_in_grid.y;
const device uchar* expert = w + ulong(ids[pair]) * ulong(N) * (K / BLOCK) * BYTES;

float acc[ROWS];
for (uint r = 0; r < ROWS; r++) acc[r] = 0.0f;
for (uint p = lane; p < uint(K) / 32; p += 32) {
  const uint block = p / PARTS, part = p % PARTS;
  const device float* xp = x + (pair / SHARE) * K + block * BLOCK;
  for (uint r = 0; r < ROWS && row0 + r < uint(N); r++) {
    float weights[32];
    unpack(expert + (ulong(row0 + r) * (K / BLOCK) + block) * BYTES, part, weights);
    for (uint run = 0; run < RUNS; run++) {
      const device float4* xr = (const device float4*)(xp + run_start(part, run));
      for (uint i = 0; i < LENGTH / 4; i++) {
        const thread float* wr = weights + run * LENGTH + 4 * i;
        acc[r] += dot(float4(wr[0], wr[1], wr[2], wr[3]), xr[i]);
      }
    }
  }
}
for (uint r = 0; r < ROWS; r++) {
  const float total = simd_sum(acc[r]);
  if (lane == 0 && row0 + r < uint(N)) y[pair * N + row0 + r] = total;
}
