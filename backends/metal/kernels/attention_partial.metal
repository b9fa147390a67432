// Attention of a few rows over one partition of their paged cache: scores, online softmax and the weighted sum of V.
//   s = softcap(scale q.k);  m = max s;  total = sum exp(s - m);  sums = sum exp(s - m) v
//
// Cache rows lie per slot: k[slot, kv head, D], slot = table[seq, position / BS] * BS + position % BS.
// Threads: one simdgroup per (partition, GROUP query heads of one kv head, row); lane l holds dimensions l, l + 32, ...
// of K, V and of the query heads, so each K and V row is read once per GROUP heads, 32 neighbours at a time.
// SPLIT: simdgroups that share a kv head; the launch splits groups until the registers are enough.
// Registers: (2 GROUP + 2) D / 32 + 2 GROUP floats, at most about 100. No threadgroup memory, no barrier.
// Template: D, DV, HKV, GROUP, SPLIT, BS, PART (positions), WINDOW (0: none), QUANT (int8 with half scales per 32).
// Grid: (32 * partitions, HKV * SPLIT, rows); threadgroup: 32.
constexpr uint DL = (D + 31) / 32;
constexpr uint VL = (DV + 31) / 32;
const uint lane = thread_index_in_simdgroup;
const uint partition = threadgroup_position_in_grid.x;
const uint head = threadgroup_position_in_grid.y / SPLIT;
const uint heads = HKV * SPLIT * GROUP, first_head = threadgroup_position_in_grid.y * GROUP;
const uint row = threadgroup_position_in_grid.z;
const uint partitions = threadgroups_per_grid.x;
const float scale = params[0], cap = params[1];
const int position = positions[row];
const uint table_row = uint(seqs[row]) * uint(table_shape[1]);

float query[GROUP][DL], sum[GROUP][VL], top[GROUP], total[GROUP];
#pragma unroll
for (uint g = 0; g < GROUP; g++) {
#pragma unroll
  for (uint j = 0; j < DL; j++) {
    const uint e = lane + 32 * j;
    query[g][j] = e < uint(D) ? scale * q[(row * heads + first_head + g) * D + e] : 0.0f;
  }
#pragma unroll
  for (uint j = 0; j < VL; j++) sum[g][j] = 0.0f;
  top[g] = -3.0e38f;
  total[g] = 0.0f;
}
const int first = WINDOW > 0 ? max(int(partition) * PART, position - WINDOW + 1) : int(partition) * PART;
const int last = min(int(partition + 1) * PART - 1, position);
for (int p = first; p <= last; p++) {
  const uint slot = uint(table[table_row + uint(p) / BS]) * BS + uint(p) % BS;
  float kr[DL], vr[VL];
#pragma unroll
  for (uint j = 0; j < DL; j++) {
    const uint e = lane + 32 * j;
    kr[j] = e < uint(D) ? float(k[ulong(slot * HKV + head) * D + e]) : 0.0f;
    if (QUANT) kr[j] *= float(k_scales[ulong(slot * HKV + head) * (D / 32) + j]);
  }
#pragma unroll
  for (uint j = 0; j < VL; j++) {
    const uint e = lane + 32 * j;
    vr[j] = e < uint(DV) ? float(v[ulong(slot * HKV + head) * DV + e]) : 0.0f;
    if (QUANT) vr[j] *= float(v_scales[ulong(slot * HKV + head) * (DV / 32) + j]);
  }
#pragma unroll
  for (uint g = 0; g < GROUP; g++) {
    float part = 0.0f;
#pragma unroll
    for (uint j = 0; j < DL; j++) part += query[g][j] * kr[j];
    float score = simd_sum(part);
    if (cap > 0.0f) score = cap * precise::tanh(score / cap);
    const float higher = max(top[g], score);
    const float keep = exp(top[g] - higher), weight = exp(score - higher);
    total[g] = total[g] * keep + weight;
#pragma unroll
    for (uint j = 0; j < VL; j++) sum[g][j] = sum[g][j] * keep + weight * vr[j];
    top[g] = higher;
  }
}
#pragma unroll
for (uint g = 0; g < GROUP; g++) {
  const uint at = (row * heads + first_head + g) * partitions + partition;
#pragma unroll
  for (uint j = 0; j < VL; j++) {
    const uint e = lane + 32 * j;
    if (e < uint(DV)) sums[ulong(at) * DV + e] = sum[g][j];
  }
  if (lane == 0) {
    stats[at * 2] = top[g];
    stats[at * 2 + 1] = total[g];
  }
}
