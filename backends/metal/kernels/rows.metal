// The product that all matvec kernels share: acc[r * M + m] += W[row r] . x[m] over this lane's parts of 32 weights.
// NORM: x is multiplied by `gain` on the way, and squares[m] collects this lane's share of |x[m]|^2.
//
// Threads: the 32 lanes of a simdgroup take the parts of a row in turn, so together they read its bytes in order.
// Bytes: a weight byte comes from memory once, whatever M; scales are read by the 2 to 8 neighbouring lanes of their
// block, from one cache line. x and gain (4 bytes a weight and row of x) come from the cache, one 16-byte load for R
// rows of W: with R = 2 and M = 1 that is 3.6 times the bytes of Q4_K, 7.1 times with NORM, 28 times with M = 8.
// Instructions per weight: one FMA per row of x, and 3 to 5 to unpack it.
// Registers: 32 R unpacked weights, R M sums, M squares, about 20 more, and up to 14 of a type's raw bytes and scales:
// at most 122 of the 128 an M1 thread can have. Loops are unrolled whole because an array indexed by a loop variable
// would live in memory instead.
// No threadgroup memory, no barrier.
template <int K, int M, int R, bool NORM>
inline void multiply(const device uchar* w, uint rows, const device float* x, const device float* gain, uint lane,
                     thread float* acc, thread float* squares) {
  constexpr uint PARTS = BLOCK / 32;
  constexpr uint LENGTH = 32 / RUNS;
  for (uint p = lane; p < uint(K) / 32; p += 32) {
    const uint block = p / PARTS, part = p % PARTS;
    float weights[R * 32];
#pragma unroll
    for (int r = 0; r < R; r++) {
      const uint row = min(uint(r), rows - 1);  // past the last row: the last again, and nobody stores it
      unpack(w + (ulong(row) * (K / BLOCK) + block) * BYTES, part, weights + 32 * r);
    }
#pragma unroll
    for (uint run = 0; run < RUNS; run++) {
      const uint at = block * BLOCK + run_start(part, run);
#pragma unroll
      for (uint i = 0; i < LENGTH; i += 4) {
        float4 g = float4(1.0f);
        if (NORM) g = *(const device float4*)(gain + at + i);
#pragma unroll
        for (int m = 0; m < M; m++) {
          float4 v = *(const device float4*)(x + m * K + at + i);
          if (NORM) {
            squares[m] += dot(v, v);
            v = v * g;
          }
#pragma unroll
          for (int r = 0; r < R; r++) {
            const thread float* u = weights + 32 * r + run * LENGTH + i;
            acc[r * M + m] += dot(float4(u[0], u[1], u[2], u[3]), v);
          }
        }
      }
    }
  }
}
