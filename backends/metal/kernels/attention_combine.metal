// Joins the partitions of attention_partial in rising order:
//   out = sum_p exp(m_p - M) sums_p / (sum_p exp(m_p - M) total_p + exp(sink - M)),  M = max of all m_p and the sink
//
// Threads: one per output value. Template: DV, SINKS (whether sinks[head] takes part).
// Grid: (DV, heads, rows); threadgroup: (min(DV, 64), 1, 1).
const uint e = thread_position_in_grid.x;
const uint head = thread_position_in_grid.y;
const uint row = thread_position_in_grid.z;
const uint heads = uint(stats_shape[1]), partitions = uint(stats_shape[2]);
const uint at = (row * heads + head) * partitions;
float top = SINKS ? float(sinks[head]) : -3.0e38f;
for (uint p = 0; p < partitions; p++) top = max(top, stats[(at + p) * 2]);
float sum = 0.0f, total = SINKS ? exp(float(sinks[head]) - top) : 0.0f;
for (uint p = 0; p < partitions; p++) {
  const float weight = exp(stats[(at + p) * 2] - top);
  total += weight * stats[(at + p) * 2 + 1];
  sum += weight * sums[ulong(at + p) * DV + e];
}
out[(row * heads + head) * DV + e] = sum / total;
