// y[p, n] = sum over k of W[ids[p], n, k] x[p / SHARE, k] for P pairs (token, chosen expert): only the chosen experts'
// rows are read. SHARE is the number of pairs that share a row of x (n_used, or 1 when each pair has its own).
//
// Threads and budget: as rows.metal with M = 1; grid y is the pair. Template: K, N, SHARE, ROWS.
// Grid: (32 * ceil(N / ROWS), P) threads; threadgroup: (a multiple of 32, 1).
const uint lane = thread_index_in_simdgroup;
const uint row0 = thread_position_in_grid.x / 32 * ROWS;
const uint pair = thread_position_in_grid.y;
const device uchar* first = w + (ulong(ids[pair]) * N + row0) * (K / BLOCK) * BYTES;
const device float* row = x + (pair / SHARE) * K;

float acc[ROWS];
for (int r = 0; r < ROWS; r++) acc[r] = 0.0f;
multiply<K, 1, ROWS, false>(first, uint(N) - row0, row, row, lane, acc, acc);
for (int r = 0; r < ROWS; r++) {
  const float total = simd_sum(acc[r]);
  if (lane == 0 && row0 + uint(r) < uint(N)) y[pair * N + row0 + uint(r)] = total;
}
