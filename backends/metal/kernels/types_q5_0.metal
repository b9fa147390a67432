// Q5_0: 32 weights in 22 bytes: half d; 32 fifth bits; nibbles as Q4_0. w = d (q - 16).
// A part is the block: eleven 2-byte loads.
// Budget: 0.6875 bytes, about 7 instructions to unpack a weight; 3 registers more than rows.metal counts.
constant constexpr uint BLOCK = 32;
constant constexpr uint BYTES = 22;
constant constexpr uint RUNS = 1;
inline uint run_start(uint part, uint run) { return 0; }
inline void unpack(const device uchar* block, uint part, thread float* w) {
  const device ushort* p = (const device ushort*)block;
  const float d = float(as_type<half>(p[0]));
  const uint high = uint(p[1]) | (uint(p[2]) << 16);
#pragma unroll
  for (uint j = 0; j < 8; j++) {
    const uint q = p[3 + j];
#pragma unroll
    for (uint i = 0; i < 2; i++) {
      const uint low = q >> (8 * i), at = 2 * j + i;
      w[at] = d * (float((low & 15u) | (((high >> at) & 1u) << 4)) - 16.0f);
      w[at + 16] = d * (float(((low >> 4) & 15u) | (((high >> (at + 16)) & 1u) << 4)) - 16.0f);
    }
  }
}
