// Q6_K: 256 weights in 210 bytes: 128 bytes of low nibbles, 64 bytes of high 2 bits, 16 int8 scales (one per 16
// weights), half d. In half h, byte l of the high bits serves weights 128 h + l + 32 s at bit 2 s; their nibbles are
// the low (s = 0, 1) and high (s = 2, 3) halves of bytes l and l + 32. w = d sc (q - 32).
// A part is 8 high-bit bytes: four runs of 8 weights; loads 2 bytes wide (alignment).
// Budget: 0.820312 bytes, about 6 instructions to unpack a weight; 8 registers more than rows.metal counts.
constant constexpr uint BLOCK = 256;
constant constexpr uint BYTES = 210;
constant constexpr uint RUNS = 4;
inline uint run_start(uint part, uint run) { return 128 * (part / 4) + 32 * run + 8 * (part % 4); }
inline void unpack(const device uchar* block, uint part, thread float* w) {
  const device ushort* low = (const device ushort*)(block + 64 * (part / 4) + 8 * (part % 4));
  const device ushort* high = (const device ushort*)(block + 128 + 32 * (part / 4) + 8 * (part % 4));
  const device char* scales = (const device char*)(block + 192);
  const float d = float(as_type<half>(*(const device ushort*)(block + 208)));
  float scale[4];
#pragma unroll
  for (uint run = 0; run < 4; run++) scale[run] = d * float(scales[run_start(part, run) / 16]);
#pragma unroll
  for (uint i = 0; i < 4; i++) {
    const uint a = low[i], b = low[i + 16], h = high[i];
#pragma unroll
    for (uint j = 0; j < 2; j++) {
      const uint la = (a >> (8 * j)) & 255u, lb = (b >> (8 * j)) & 255u, hh = h >> (8 * j);
      const uint at = 2 * i + j;
      w[at] = scale[0] * (float((la & 15u) | ((hh & 3u) << 4)) - 32.0f);
      w[8 + at] = scale[1] * (float((lb & 15u) | (((hh >> 2) & 3u) << 4)) - 32.0f);
      w[16 + at] = scale[2] * (float((la >> 4) | (((hh >> 4) & 3u) << 4)) - 32.0f);
      w[24 + at] = scale[3] * (float((lb >> 4) | (((hh >> 6) & 3u) << 4)) - 32.0f);
    }
  }
}
