// y[m, n] = sum over k of W[n, k] x[m, k] for M = 1..8 rows of activations, for one to three matrices of one type and
// row length at once (q, k, v; gate, up). With NORM the rows of x are normed on the way: x[m] gain / rms(x[m]); every
// simdgroup needs the whole of x, so it finds the mean square itself.
//
// W lies as GGUF blocks; types_<type>.metal says how a part of 32 weights unpacks, rows.metal has the product and its
// budget. Matrices that are not there have N = 0. y holds (M, N0), then (M, N1), then (M, N2).
// Threads: a simdgroup owns ROWS rows of one matrix.
// Template: K, M, N0, N1, N2, ROWS, NORM. Grid: 32 * (sum of ceil(N / ROWS)) threads; threadgroup: a multiple of 32.
constexpr uint S0 = (N0 + ROWS - 1) / ROWS, S1 = (N1 + ROWS - 1) / ROWS;
const uint lane = thread_index_in_simdgroup;
const uint unit = thread_position_in_grid.x / 32;
const uint which = unit < S0 ? 0u : unit < S0 + S1 ? 1u : 2u;
const uint n = which == 0 ? uint(N0) : which == 1 ? uint(N1) : uint(N2);
const uint row0 = ROWS * (which == 0 ? unit : which == 1 ? unit - S0 : unit - S0 - S1);
const device uchar* matrix = which == 0 ? w0 : which == 1 ? w1 : w2;
device float* out = y + M * (which == 0 ? 0u : which == 1 ? uint(N0) : uint(N0) + uint(N1));

float acc[ROWS * M], squares[M];
for (int i = 0; i < ROWS * M; i++) acc[i] = 0.0f;
for (int m = 0; m < M; m++) squares[m] = 0.0f;
const device uchar* first = matrix + ulong(row0) * (K / BLOCK) * BYTES;
multiply<K, M, ROWS, NORM>(first, n - row0, x, gain, lane, acc, squares);
for (int m = 0; m < M; m++) {
  const float factor = NORM ? precise::rsqrt(simd_sum(squares[m]) / float(K) + eps[0]) : 1.0f;
  for (int r = 0; r < ROWS; r++) {
    const float total = factor * simd_sum(acc[r * M + m]);
    if (lane == 0 && row0 + uint(r) < n) out[m * n + row0 + uint(r)] = total;
  }
}
