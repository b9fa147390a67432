// IQ4_XS: 256 weights in 136 bytes: half d; 16 bits: high 2 bits of 8 scales; 4 bytes: their low nibbles; 128 bytes:
// sub-block j in bytes 16 j.., nibbles as Q4_0. w = d (scale - 32) LEVELS[q].
// A part is a sub-block: two 8-byte loads of nibbles.
// Budget: 0.53125 bytes, about 4 instructions to unpack a weight; 5 registers more than rows.metal counts.
constant constexpr uint BLOCK = 256;
constant constexpr uint BYTES = 136;
constant constexpr uint RUNS = 1;
// The 16 levels of IQ4_NL and IQ4_XS.
constant constexpr float LEVELS[16] = {-127.0f, -104.0f, -83.0f, -65.0f, -49.0f, -35.0f, -22.0f, -10.0f,
                                       1.0f,    13.0f,   25.0f,  38.0f,  53.0f,  69.0f,  89.0f,  113.0f};
inline uint run_start(uint part, uint run) { return 32 * part; }
inline void unpack(const device uchar* block, uint part, thread float* w) {
  const uint2 head = *(const device uint2*)block;
  const uint low = (head.y >> (4 * part)) & 15u, high = (head.x >> (16 + 2 * part)) & 3u;
  const float d = float(as_type<half2>(head.x).x) * (float(low | (high << 4)) - 32.0f);
  const device uint2* p = (const device uint2*)(block + 8 + 16 * part);
#pragma unroll
  for (uint j = 0; j < 2; j++) {
    const uint2 q = p[j];
#pragma unroll
    for (uint i = 0; i < 8; i++) {
      const uint byte = q[i / 4] >> (8 * (i % 4));
      w[8 * j + i] = d * LEVELS[byte & 15u];
      w[8 * j + i + 16] = d * LEVELS[(byte >> 4) & 15u];
    }
  }
}
