// Q5_K: 256 weights in 176 bytes: half d, half dmin; 12 bytes of scales as Q4_K; 32 bytes of fifth bits (byte l,
// bit j: weight l of sub-block j); nibbles as Q4_K. w = d sc q - dmin m.
// A part is 16 bytes of nibbles, as Q4_K: three 16-byte loads (head, fifth bits, nibbles). The fifth bits of a block
// serve four parts, whose lanes are neighbours and share the cache line.
// Budget: 0.6875 bytes, about 6 instructions to unpack a weight; 14 registers more than rows.metal counts.
constant constexpr uint BLOCK = 256;
constant constexpr uint BYTES = 176;
constant constexpr uint RUNS = 2;
inline uint run_start(uint part, uint run) { return 64 * (part / 2) + 32 * run + 16 * (part % 2); }
// (scale, min) of sub-block j: 6 bits each, packed in the 12 bytes after d and dmin (head.yzw).
inline float2 sub_block(uint4 head, uint j) {
  const uint shift = 8 * (j % 4);
  const uint a = head.y >> shift, m = head.z >> shift, h = head.w >> shift;
  if (j < 4) return float2(float(a & 63u), float(m & 63u));
  return float2(float((h & 15u) | ((a >> 2) & 48u)), float(((h >> 4) & 15u) | ((m >> 2) & 48u)));
}
inline void unpack(const device uchar* block, uint part, thread float* w) {
  const uint4 head = *(const device uint4*)block;
  const uint4 high = *(const device uint4*)(block + 16 + 16 * (part % 2));
  const uint4 q = *(const device uint4*)(block + 48 + 16 * part);
  const uint j = 2 * (part / 2);
  const float2 d = float2(as_type<half2>(head.x));
  const float2 a = d * sub_block(head, j), b = d * sub_block(head, j + 1);
#pragma unroll
  for (uint i = 0; i < 16; i++) {
    const uint low = q[i / 4] >> (8 * (i % 4)), bits = high[i / 4] >> (8 * (i % 4) + j);
    w[i] = a.x * float((low & 15u) | ((bits & 1u) << 4)) - a.y;
    w[16 + i] = b.x * float(((low >> 4) & 15u) | ((bits & 2u) << 3)) - b.y;
  }
}
