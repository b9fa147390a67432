// Q5_K: 256 weights in 176 bytes: half d, half dmin; 12 bytes of scales as Q4_K; 32 bytes of fifth bits (byte l,
// bit j: weight l of sub-block j); nibbles as Q4_K. w = d sc q - dmin m.
// A part is 4 fifth-bit bytes: eight runs of 4 weights; five 4-byte loads, each byte read once. 0.6875 bytes a weight.
constant constexpr uint BLOCK = 256;
constant constexpr uint BYTES = 176;
constant constexpr uint RUNS = 8;
inline uint run_start(uint part, uint run) { return 32 * run + 4 * part; }
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
  const device uint* p = (const device uint*)block;
  const float2 d = float2(as_type<half2>(p[0]));
  const uint high = p[4 + part];
  for (uint c = 0; c < 4; c++) {
    const uint q = p[12 + 8 * c + part];
    const float2 a = sub_block(block, d, 2 * c), b = sub_block(block, d, 2 * c + 1);
    for (uint i = 0; i < 4; i++) {
      const uint low = (q >> (8 * i)) & 255u, bits = high >> (8 * i + 2 * c);
      w[8 * c + i] = a.x * float((low & 15u) | ((bits & 1u) << 4)) - a.y;
      w[8 * c + 4 + i] = b.x * float((low >> 4) | (((bits >> 1) & 1u) << 4)) - b.y;
    }
  }
}
