// Q4_K: 256 weights in 144 bytes: half d, half dmin; 12 bytes: 8 six-bit scales and mins; 4 x 32 bytes of nibbles,
// chunk c holding sub-block 2c (low) and 2c + 1 (high). w = d sc q - dmin m.
// A part is 16 bytes of nibbles: two runs of 16 weights, one 16-byte load. 0.5625 bytes a weight.
constant constexpr uint BLOCK = 256;
constant constexpr uint BYTES = 144;
constant constexpr uint RUNS = 2;
inline uint run_start(uint part, uint run) { return 64 * (part / 2) + 32 * run + 16 * (part % 2); }
// (d * scale, dmin * min) of sub-block j: 6 bits each, packed in the 12 bytes after d and dmin.
inline float2 sub_block(const device uchar* block, float2 d, uint j) {
  const device uchar* s = block + 4;
  uint scale, low;
  if (j < 4) {
    scale = s[j] & 63u;
    low = s[j + 4] & 63u;
  } else {
    scale = (s[j + 4] & 15u) | ((uint(s[j - 4]) >> 6) << 4);
    low = (uint(s[j + 4]) >> 4) | ((uint(s[j]) >> 6) << 4);
  }
  return d * float2(float(scale), float(low));
}
inline void unpack(const device uchar* block, uint part, thread float* w) {
  const float2 d = float2(as_type<half2>(*(const device uint*)block));
  const uint4 q = *(const device uint4*)(block + 16 + 16 * part);
  const float2 a = sub_block(block, d, 2 * (part / 2));
  const float2 b = sub_block(block, d, 2 * (part / 2) + 1);
  for (uint i = 0; i < 16; i++) {
    const uint byte = q[i / 4] >> (8 * (i % 4));
    w[i] = a.x * float(byte & 15u) - a.y;
    w[16 + i] = b.x * float((byte >> 4) & 15u) - b.y;
  }
}
