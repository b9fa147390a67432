// Q2_K: 256 weights in 84 bytes: 16 bytes of 4-bit scale (low) and min (high), one per 16 weights; 64 bytes of
// 2-bit q: byte l of half h holds weights 128 h + l + 32 s at bit 2 s; half d, half dmin. w = d sc q - dmin m.
// A part is 8 bytes of q: four runs of 8 weights. Two 4-byte loads of q.
// Budget: 0.328125 bytes, about 4 instructions to unpack a weight; 5 registers more than rows.metal counts.
constant constexpr uint BLOCK = 256;
constant constexpr uint BYTES = 84;
constant constexpr uint RUNS = 4;
inline uint run_start(uint part, uint run) { return 128 * (part / 4) + 32 * run + 8 * (part % 4); }
inline void unpack(const device uchar* block, uint part, thread float* w) {
  const device uint* p = (const device uint*)block;
  const float2 d = float2(as_type<half2>(p[20]));
  const uint q0 = p[4 + 2 * part], q1 = p[5 + 2 * part];
#pragma unroll
  for (uint run = 0; run < 4; run++) {
    const uint sm = block[run_start(part, run) / 16];
    const float scale = d.x * float(sm & 15u), low = d.y * float(sm >> 4);
#pragma unroll
    for (uint i = 0; i < 8; i++) {
      const uint q = (i < 4 ? q0 : q1) >> (8 * (i % 4) + 2 * run);
      w[8 * run + i] = scale * float(q & 3u) - low;
    }
  }
}
