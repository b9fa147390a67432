// IQ4_NL: 32 weights in 18 bytes: half d; nibbles as Q4_0 that index a table. w = d LEVELS[q].
// A part is the block: nine 2-byte loads.
// Budget: 0.5625 bytes, about 3.5 instructions to unpack a weight; 2 registers more than rows.metal counts.
constant constexpr uint BLOCK = 32;
constant constexpr uint BYTES = 18;
constant constexpr uint RUNS = 1;
// The 16 levels of IQ4_NL and IQ4_XS.
constant constexpr float LEVELS[16] = {-127.0f, -104.0f, -83.0f, -65.0f, -49.0f, -35.0f, -22.0f, -10.0f,
                                       1.0f,    13.0f,   25.0f,  38.0f,  53.0f,  69.0f,  89.0f,  113.0f};
inline uint run_start(uint part, uint run) { return 0; }
inline void unpack(const device uchar* block, uint part, thread float* w) {
  const device ushort* p = (const device ushort*)block;
  const float d = float(as_type<half>(p[0]));
#pragma unroll
  for (uint i = 0; i < 8; i++) {
    const uint q = p[1 + i];
    w[2 * i] = d * LEVELS[q & 15u];
    w[2 * i + 1] = d * LEVELS[(q >> 8) & 15u];
    w[2 * i + 16] = d * LEVELS[(q >> 4) & 15u];
    w[2 * i + 17] = d * LEVELS[q >> 12];
  }
}
