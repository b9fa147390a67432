// F16: plain half weights. A part is 32 weights, 64 bytes: four 16-byte loads.
// Budget: 2 bytes, about 1 instructions to unpack a weight; 4 registers more than rows.metal counts.
constant constexpr uint BLOCK = 32;
constant constexpr uint BYTES = 64;
constant constexpr uint RUNS = 1;
inline uint run_start(uint part, uint run) { return 0; }
inline void unpack(const device uchar* block, uint part, thread float* w) {
#pragma unroll
  for (uint j = 0; j < 4; j++) {
    const uint4 v = *(const device uint4*)(block + 16 * j);
#pragma unroll
    for (uint i = 0; i < 4; i++) {
      const half2 h = as_type<half2>(v[i]);
      w[8 * j + 2 * i] = float(h.x);
      w[8 * j + 2 * i + 1] = float(h.y);
    }
  }
}
