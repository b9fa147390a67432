// Q4_1: 32 weights in 20 bytes: half d, half m; nibbles as Q4_0. w = d q + m.
// A part is the block: five 4-byte loads.
// Budget: 0.625 bytes, about 3.5 instructions to unpack a weight; 3 registers more than rows.metal counts.
constant constexpr uint BLOCK = 32;
constant constexpr uint BYTES = 20;
constant constexpr uint RUNS = 1;
inline uint run_start(uint part, uint run) { return 0; }
inline void unpack(const device uchar* block, uint part, thread float* w) {
  const device uint* p = (const device uint*)block;
  const float2 dm = float2(as_type<half2>(p[0]));
#pragma unroll
  for (uint j = 0; j < 4; j++) {
    const uint q = p[1 + j];
#pragma unroll
    for (uint i = 0; i < 4; i++) {
      w[4 * j + i] = dm.x * float((q >> (8 * i)) & 15u) + dm.y;
      w[4 * j + i + 16] = dm.x * float((q >> (8 * i + 4)) & 15u) + dm.y;
    }
  }
}
