// MXFP4: 32 weights in 17 bytes: 8-bit exponent e; nibbles as Q4_0 that index the E2M1 values (kept doubled, so the
// scale is halved). w = 2^(e - 128) VALUES[q]. A part is the block, byte loads (odd size).
// Budget: 0.53125 bytes, about 3.5 instructions to unpack a weight; 2 registers more than rows.metal counts.
constant constexpr uint BLOCK = 32;
constant constexpr uint BYTES = 17;
constant constexpr uint RUNS = 1;
constant constexpr float VALUES[16] = {0.0f, 1.0f,  2.0f,  3.0f,  4.0f,  6.0f,  8.0f,  12.0f,
                                       0.0f, -1.0f, -2.0f, -3.0f, -4.0f, -6.0f, -8.0f, -12.0f};
inline uint run_start(uint part, uint run) { return 0; }
inline void unpack(const device uchar* block, uint part, thread float* w) {
  const uint e = block[0];
  const float d = as_type<float>(e < 2u ? 0x00200000u << e : (e - 1u) << 23);
#pragma unroll
  for (uint i = 0; i < 16; i++) {
    const uint q = block[1 + i];
    w[i] = d * VALUES[q & 15u];
    w[i + 16] = d * VALUES[q >> 4];
  }
}
