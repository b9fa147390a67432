// Q8_0: 32 weights in 34 bytes: half d; 32 int8. w = d q.
// A part is the block: seventeen 2-byte loads.
// Budget: 1.0625 bytes, about 2.5 instructions to unpack a weight; 2 registers more than rows.metal counts.
constant constexpr uint BLOCK = 32;
constant constexpr uint BYTES = 34;
constant constexpr uint RUNS = 1;
inline uint run_start(uint part, uint run) { return 0; }
inline void unpack(const device uchar* block, uint part, thread float* w) {
  const device ushort* p = (const device ushort*)block;
  const float d = float(as_type<half>(p[0]));
#pragma unroll
  for (uint i = 0; i < 16; i++) {
    const char2 q = as_type<char2>(p[1 + i]);
    w[2 * i] = d * float(q.x);
    w[2 * i + 1] = d * float(q.y);
  }
}
