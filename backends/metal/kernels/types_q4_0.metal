// Q4_0: 32 weights in 18 bytes: half d; 16 bytes of nibbles, low 0..15, high 16..31. w = d (q - 8).
// A part is the block: nine 2-byte loads (blocks are only 2-byte aligned).
// Budget: 0.5625 bytes, about 4.5 instructions to unpack a weight; 2 registers more than rows.metal counts.
constant constexpr uint BLOCK = 32;
constant constexpr uint BYTES = 18;
constant constexpr uint RUNS = 1;
inline uint run_start(uint part, uint run) { return 0; }
inline void unpack(const device uchar* block, uint part, thread float* w) {
  const device ushort* p = (const device ushort*)block;
  const float d = float(as_type<half>(p[0]));
#pragma unroll
  for (uint i = 0; i < 8; i++) {
    const uint q = p[1 + i];
    w[2 * i] = d * (float(q & 15u) - 8.0f);
    w[2 * i + 1] = d * (float((q >> 8) & 15u) - 8.0f);
    w[2 * i + 16] = d * (float((q >> 4) & 15u) - 8.0f);
    w[2 * i + 17] = d * (float(q >> 12) - 8.0f);
  }
}
