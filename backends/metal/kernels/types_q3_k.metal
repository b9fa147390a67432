// Q3_K: 256 weights in 110 bytes: 32 bytes of high bits (byte l, bit g: weight 32 g + l); 64 bytes of 2-bit q as
// Q2_K; 12 bytes: 16 six-bit scales; half d. w = d (sc - 32) (q - (high bit ? 0 : 4)).
// A part is 4 high-bit bytes: eight runs of 4 weights. All loads 2 bytes wide (alignment).
// Budget: 0.429688 bytes, about 6 instructions to unpack a weight; 5 registers more than rows.metal counts.
constant constexpr uint BLOCK = 256;
constant constexpr uint BYTES = 110;
constant constexpr uint RUNS = 8;
inline uint run_start(uint part, uint run) { return 32 * run + 4 * part; }
inline uint load4(const device uchar* p) {
  const device ushort* s = (const device ushort*)p;
  return uint(s[0]) | (uint(s[1]) << 16);
}
inline float q3_scale(const device uchar* s, uint j) {
  const uint low = j < 8 ? s[j] & 15u : uint(s[j - 8]) >> 4;
  const uint high = (uint(s[8 + j % 4]) >> (2 * (j / 4))) & 3u;
  return float(low | (high << 4)) - 32.0f;
}
inline void unpack(const device uchar* block, uint part, thread float* w) {
  const float d = float(as_type<half>(*(const device ushort*)(block + 108)));
  const uint high = load4(block + 4 * part);
  const uint q0 = load4(block + 32 + 4 * part), q1 = load4(block + 64 + 4 * part);
#pragma unroll
  for (uint run = 0; run < 8; run++) {
    const float scale = d * q3_scale(block + 96, 2 * run + part / 4);
    const uint q = (run < 4 ? q0 : q1) >> (2 * (run % 4));
#pragma unroll
    for (uint i = 0; i < 4; i++) {
      const float value = float((q >> (8 * i)) & 3u);
      w[4 * run + i] = scale * (((high >> (8 * i + run)) & 1u) != 0u ? value : value - 4.0f);
    }
  }
}
