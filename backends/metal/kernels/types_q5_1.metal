// Q5_1: 32 weights in 24 bytes: half d, half m; 32 fifth bits; nibbles as Q4_0. w = d q + m.
// A part is the block: three 8-byte loads.
// Budget: 0.75 bytes, about 6 instructions to unpack a weight; 5 registers more than rows.metal counts.
constant constexpr uint BLOCK = 32;
constant constexpr uint BYTES = 24;
constant constexpr uint RUNS = 1;
inline uint run_start(uint part, uint run) { return 0; }
inline void unpack(const device uchar* block, uint part, thread float* w) {
  const device uint2* p = (const device uint2*)block;
  const uint2 head = p[0];
  const float2 dm = float2(as_type<half2>(head.x));
  const uint high = head.y;
#pragma unroll
  for (uint j = 0; j < 2; j++) {
    const uint2 q = p[1 + j];
#pragma unroll
    for (uint i = 0; i < 8; i++) {
      const uint low = q[i / 4] >> (8 * (i % 4)), at = 8 * j + i;
      w[at] = dm.x * float((low & 15u) | (((high >> at) & 1u) << 4)) + dm.y;
      w[at + 16] = dm.x * float(((low >> 4) & 15u) | (((high >> (at + 16)) & 1u) << 4)) + dm.y;
    }
  }
}
