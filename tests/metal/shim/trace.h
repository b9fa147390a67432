// trace.h: memory checks of a traced build: bounds, races, uninitialised reads, alignment. Part of runtime.cpp.
#pragma once
struct Access { unsigned group, lane, epoch, simd_epoch; };  // group is 1-based; 0: none
struct Cell { Access w, r1, r2; bool written; };
struct Region { Memory mem; std::vector<Cell> cells; std::vector<uint16_t> reads; };
std::vector<Region> buffer_regions, shared_regions;
uintptr_t module_lo, module_hi;

bool ordered(const Access& a, const Access& now) {
  if (!a.group) return true;
  if (a.group != now.group) return false;  // nothing orders two threadgroups of a grid
  return a.lane == now.lane || a.epoch != now.epoch ||
         (a.lane / SIMD == now.lane / SIMD && a.simd_epoch != now.simd_epoch);
}

bool check_in(Buffer& b, Region& r, uintptr_t a, size_t n, bool write, const void* pc) {
  if (a < (uintptr_t)b.p || a + n > (uintptr_t)b.p + b.n) return false;
  size_t off = a - (uintptr_t)b.p;
  if (write && !b.writable)
    say("write-to-input", pc, "%s writes input %s[byte %zu]", lane_name(cur).c_str(), b.name, off);
  if (r.cells.empty()) {  // an input: nothing to race with, only count
    for (size_t i = off; i < off + n; i++) if (r.reads[i] != 0xffff) r.reads[i]++;
    return true;
  }
  unsigned id = cur->id.thread_index_in_threadgroup;
  Access now = {group_no + 1, id, cur->epoch[r.mem], cur->simd_epoch[r.mem]};
  for (size_t i = off; i < off + n; i++) {
    Cell& c = r.cells[i];
    bool clash = !ordered(c.w, now) || (write && (!ordered(c.r1, now) || !ordered(c.r2, now)));
    if (clash) {
      const Access& o = !ordered(c.w, now) ? c.w : !ordered(c.r1, now) ? c.r1 : c.r2;
      say("race", pc, "%s %s %s[byte %zu], which thread %u of threadgroup %u %s with no barrier between",
          lane_name(cur).c_str(), write ? "writes" : "reads", b.name, i, o.lane, o.group - 1, &o == &c.w ? "wrote" : "read");
    }
    if (write) { c.w = now; c.written = true; }
    else {
      if (!c.written)
        say("uninitialised", pc, "%s reads %s[byte %zu], which nothing has written", lane_name(cur).c_str(), b.name, i);
      if (c.r1.lane != now.lane || c.r1.group != now.group) c.r2 = c.r1;  // the last two readers do
      c.r1 = now;
    }
  }
  return true;
}

void check_access(const void* p, size_t n, bool write, bool aligned, const void* pc) {
  if (!cur) return;
  uintptr_t a = (uintptr_t)p;
  if (a - (uintptr_t)cur->stack < STACK) return;  // private memory
  Lane* me = cur;
  if (aligned && n <= 8 && a % n)
    say("misaligned", pc, "%s: %zu-byte access at an address that is %zu mod %zu", lane_name(me).c_str(), n, size_t(a % n), n);
  for (size_t i = 0; i < buffers.size(); i++)
    if (check_in(buffers[i], buffer_regions[i], a, n, write, pc)) return;
  for (size_t i = 0; i < shared.size(); i++)
    if (check_in(shared[i], shared_regions[i], a, n, write, pc)) return;
  if (!write && a >= module_lo && a < module_hi) return;  // constant tables
  Buffer* near = nullptr;
  size_t best = ~size_t(0);
  for (auto* v : {&buffers, &shared})
    for (Buffer& b : *v) {
      size_t d = a < (uintptr_t)b.p ? (uintptr_t)b.p - a : a - (uintptr_t)b.p;
      if (d < best) { best = d; near = &b; }
    }
  say("out-of-bounds", pc, "%s %s %zu byte(s) at %s[byte %ld] of %zu bytes", lane_name(me).c_str(),
      write ? "writes" : "reads", n, near ? near->name : "?", near ? long(a - (uintptr_t)near->p) : 0L, near ? near->n : 0);
  give_up();
}
int find_module(dl_phdr_info* info, size_t, void*) {
  for (int i = 0; i < info->dlpi_phnum; i++) {
    const auto& h = info->dlpi_phdr[i];
    uintptr_t lo = info->dlpi_addr + h.p_vaddr;
    if (h.p_type == PT_LOAD && (uintptr_t)&find_module - lo < h.p_memsz) {
      module_lo = ~uintptr_t(0), module_hi = 0;
      for (int j = 0; j < info->dlpi_phnum; j++)
        if (info->dlpi_phdr[j].p_type == PT_LOAD) {
          uintptr_t s = info->dlpi_addr + info->dlpi_phdr[j].p_vaddr;
          module_lo = s < module_lo ? s : module_lo;
          module_hi = s + info->dlpi_phdr[j].p_memsz > module_hi ? s + info->dlpi_phdr[j].p_memsz : module_hi;
        }
      return 1;
    }
  }
  return 0;
}
