// Q4_K: 256 weights in 144 bytes: half d, half dmin; 12 bytes: 8 six-bit scales and mins; 4 x 32 bytes of nibbles,
// chunk c holding sub-block 2c (low) and 2c + 1 (high). w = d sc q - dmin m.
// A part is 16 bytes of nibbles, two runs of 16 weights: two 16-byte loads (head, nibbles).
// Budget: 0.5625 bytes, about 3.5 instructions to unpack a weight; 10 registers more than rows.metal counts.
constant constexpr uint BLOCK = 256;
constant constexpr uint BYTES = 144;
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
  const uint4 q = *(const device uint4*)(block + 16 + 16 * part);
  const uint j = 2 * (part / 2);
  const float2 d = float2(as_type<half2>(head.x));
  const float2 a = d * sub_block(head, j), b = d * sub_block(head, j + 1);
#pragma unroll
  for (uint i = 0; i < 16; i++) {
    const uint byte = q[i / 4] >> (8 * (i % 4));
    w[i] = a.x * float(byte & 15u) - a.y;
    w[16 + i] = b.x * float((byte >> 4) & 15u) - b.y;
  }
}
