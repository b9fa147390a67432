// runtime.cpp: runs a grid of threadgroups, one lane at a time, and checks what the lanes do.
// Linked with the kernel's translation unit into one shared library.
//
// Lanes are fibers: a lane runs until it meets the others at a simd_* call or a barrier. -DMSL_TRACE adds the memory
// checks: the kernel is then compiled with g++ -fsanitize=thread, but instead of libtsan the hooks in trace_hooks.h
// are linked, so that every load and store of a lane comes past them.
#include "abi.h"

#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <set>
#include <string>
#include <vector>
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace {

const unsigned SIMD = 32;
const size_t STACK = 256 << 10;
enum State { RUN, WAIT, DONE };
enum Memory { TG, DEV };  // threadgroup memory, device memory

struct Lane {
  msl_ids id;
  State state;
  bool barrier, whole;          // what it waits at: a barrier (of the threadgroup)?
  const char* what;             // or a simd function
  int line;
  unsigned uniform, flags;
  unsigned parity;              // two slots, so that a fast lane cannot overwrite
  alignas(16) char slot[2][MSL_SLOT];
  unsigned active;              // lanes that took part in the last meeting
  unsigned epoch[2], simd_epoch[2];  // barriers passed, by Memory
  char* stack;
  void* sp;
  void* asan_stack;
};

struct Buffer {
  const char* name;
  char* p;
  size_t n;
  bool writable;
  char* base;  // what to free
};

std::vector<Lane> lanes;
std::vector<Buffer> buffers;
std::vector<Buffer> shared;  // threadgroup variables
void* args[32];
unsigned group_no;
bool aborted;
std::string report;
std::set<std::string> seen;
unsigned long switches;
Lane* cur;

// Exactly n bytes for AddressSanitizer; otherwise with room around them, so that a
// small overrun does not crash. 0xff bytes: NaN as float or half.
Buffer new_buffer(const char* name, size_t n, bool writable) {
#ifdef __SANITIZE_ADDRESS__
  const size_t pad = 0;
#else
  const size_t pad = 4096;
#endif
  char* base;
  if (posix_memalign((void**)&base, 4096, n + 2 * pad)) abort();
  memset(base, 0xff, n + 2 * pad);
  return {name, base + pad, n, writable, base};
}
void drop(std::vector<Buffer>& v) {
  for (Buffer& b : v) free(b.base);
  v.clear();
}

// One line per distinct (kind, place); the harness turns pc into file:line.
void say(const char* kind, const void* pc, const char* fmt, ...) {
  char text[400], key[100];
  va_list ap;
  va_start(ap, fmt);
  vsnprintf(text, sizeof text, fmt, ap);
  va_end(ap);
  size_t off = 0;
  Dl_info di;
  if (pc && dladdr(pc, &di)) off = (const char*)pc - (const char*)di.dli_fbase;
  snprintf(key, sizeof key, "%s@%zx", kind, off);
  if (!seen.insert(key).second) return;
  char head[64];
  snprintf(head, sizeof head, "%s\t%zx\t", kind, off);
  report += head + std::string(text) + "\n";
}

std::string lane_name(const Lane* l) {
  char b[80];
  snprintf(b, sizeof b, "threadgroup %u simdgroup %u lane %u", group_no,
           l->id.simdgroup_index_in_threadgroup, l->id.thread_index_in_simdgroup);
  return b;
}

// ---- meetings: called when no lane of the threadgroup can run -------------
bool same_place(const Lane& a, const Lane& b) {
  return a.barrier == b.barrier && a.line == b.line && a.uniform == b.uniform && a.whole == b.whole &&
         (a.barrier || !strcmp(a.what, b.what));
}

bool all_at_one_place(size_t lo, size_t hi, bool whole) {
  const Lane* first = nullptr;
  for (size_t i = lo; i < hi; i++) {
    Lane& l = lanes[i];
    if (l.state == DONE) continue;
    if (l.state != WAIT || (l.barrier && l.whole) != whole) return false;
    if (first && !same_place(*first, l)) return false;
    if (!first) first = &l;
  }
  return first;
}

void release(size_t lo, size_t hi, bool whole) {
  unsigned active = 0;
  size_t done = 0;
  for (size_t i = lo; i < hi; i++) {
    if (lanes[i].state == DONE) done++;
    else active |= 1u << (i - lo) % SIMD;
  }
  for (size_t i = lo; i < hi; i++) {
    Lane& l = lanes[i];
    if (l.state == DONE) continue;
    if (whole && done) {
      say("barrier-after-return", nullptr, "%zu lane(s) had returned before the barrier in line %d", done, l.line);
      aborted = true;
    }
    l.active = active;
    if (l.barrier)
      for (int m : {TG, DEV})
        if (l.flags & (m == TG ? 2 : 1)) (whole ? l.epoch : l.simd_epoch)[m]++;
    l.state = RUN;
  }
}

// Lets go every simdgroup, or the whole threadgroup, that has met. False: none has.
bool resolve() {
  bool any = false;
  size_t n = lanes.size();
  for (size_t lo = 0; lo < n; lo += SIMD) {
    size_t hi = lo + SIMD < n ? lo + SIMD : n;
    if (all_at_one_place(lo, hi, false)) { release(lo, hi, false); any = true; }
  }
  if (!any && all_at_one_place(0, n, true)) { release(0, n, true); any = true; }
  return any;
}

bool live() {
  for (Lane& l : lanes) if (l.state != DONE) return true;
  return false;
}

void explain_stuck() {
  std::string where;
  for (size_t i = 0; i < lanes.size();) {
    Lane& l = lanes[i];
    size_t j = i + 1;
    while (j < lanes.size() && lanes[j].state == l.state && (l.state == DONE || same_place(l, lanes[j]))) j++;
    char b[160];
    if (l.state == DONE) snprintf(b, sizeof b, "%zu-%zu returned; ", i, j - 1);
    else snprintf(b, sizeof b, "%zu-%zu at %s (line %d, argument %u); ", i, j - 1,
                  l.barrier ? (l.whole ? "threadgroup_barrier" : "simdgroup_barrier") : l.what, l.line, l.uniform);
    where += b;
    i = j;
  }
  say("divergence", nullptr, "lanes wait for each other at different places: %.300s", where.c_str());
}

// ---- switching between lanes -------------------------------------------------
#ifdef __SANITIZE_ADDRESS__
void* host_asan; const void* host_bottom; size_t host_size;
#define LEAVE(save, bottom, size) __sanitizer_start_switch_fiber(save, bottom, size)
#define ARRIVE(save, b, s) __sanitizer_finish_switch_fiber(save, b, s)
#else
#define LEAVE(save, bottom, size)
#define ARRIVE(save, b, s)
#endif

#if   defined __x86_64__
void* host;
extern "C" void msl_jump(void** save, void* to);
asm(".text\n.type msl_jump,@function\nmsl_jump:\n"
    "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
    "mov %rsp,(%rdi)\nmov %rsi,%rsp\n"
    "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n.size msl_jump,.-msl_jump\n");
void jump(Lane* from, Lane* to) { msl_jump(from ? &from->sp : &host, to ? to->sp : host); }
#else
#error "no fiber switch for this CPU: write msl_jump for it"
#endif

void to_host() {
  Lane* me = cur;
  LEAVE(me->state == DONE ? nullptr : &me->asan_stack, host_bottom, host_size);
  cur = nullptr;  // from here on the hooks are silent
  jump(me, nullptr);
  ARRIVE(me->asan_stack, &host_bottom, &host_size);
}
void to_lane(Lane* l) {
  switches++;
  LEAVE(&host_asan, l->stack, STACK);
  cur = l;
  jump(nullptr, l);
  ARRIVE(host_asan, nullptr, nullptr);
}
void lane_main() {
  ARRIVE(nullptr, &host_bottom, &host_size);
  msl_ids id = cur->id;  // on the lane's own stack
  msl_entry(args, &id);
  cur->state = DONE;
  to_host();
  abort();
}
void prepare(Lane& l) {
#ifdef __SANITIZE_ADDRESS__
  __asan_unpoison_memory_region(l.stack, STACK);  // a lane given up on left its marks
#endif
  void** top = (void**)(l.stack + STACK) - 2;
  top[0] = (void*)lane_main;  // returned to; the stack is then as if it had been called
  top[1] = nullptr;
  l.sp = top - 6;             // six saved registers
}
void wait_here() {
  cur->state = WAIT;
  to_host();
}
void run_group(int order, std::mt19937& rng) {
  std::vector<unsigned> turn(lanes.size());
  for (unsigned i = 0; i < turn.size(); i++) turn[i] = order == 1 ? turn.size() - 1 - i : i;
  for (Lane& l : lanes) prepare(l);
  while (!aborted) {
    if (order >= 2) for (size_t i = turn.size() - 1; i; i--) std::swap(turn[i], turn[rng() % (i + 1)]);
    for (unsigned i : turn)
      if (lanes[i].state == RUN && !aborted) to_lane(&lanes[i]);
    if (aborted || !live()) break;
    if (!resolve()) { explain_stuck(); aborted = true; }
  }
}

[[noreturn]] void give_up() {  // from inside a lane
  aborted = true;
  for (;;) to_host();
}

#ifdef MSL_TRACE
#include "trace.h"
#endif
}  // namespace

// ---- called by the kernel's code ---------------------------------------------
extern "C" msl_view msl_simd(const char* what, int line, unsigned uniform, const void* in, unsigned bytes) {
  Lane* me = cur;
  me->barrier = me->whole = false;
  me->what = what, me->line = line, me->uniform = uniform, me->flags = 0;
  me->parity ^= 1;
  memcpy(me->slot[me->parity], in, bytes);
  wait_here();
  Lane* first = &lanes[me->id.simdgroup_index_in_threadgroup * SIMD];
  return {me->active, me->id.thread_index_in_simdgroup, me->parity, first};
}
// What another lane of the simdgroup brought to the meeting.
extern "C" void msl_take(const msl_view* g, unsigned lane, const char* what, void* out, unsigned bytes) {
  if (lane >= SIMD || !((g->active >> lane) & 1)) {
    say("inactive-lane", (const char*)__builtin_return_address(0) - 1,
        "%s: lane %u takes the value of lane %u, which is not active", what, g->lane, lane);
    give_up();
  }
  memcpy(out, ((const Lane*)g->lanes)[lane].slot[g->parity], bytes);
}
extern "C" void msl_barrier(int whole, int line, unsigned flags) {
  Lane* me = cur;
  me->barrier = true, me->whole = whole, me->line = line, me->uniform = flags, me->flags = flags;
  wait_here();
}
// The memory of a threadgroup variable; the first lane to ask gets it made, full of garbage.
extern "C" void* msl_shared(const char* name, unsigned long n) {
  for (Buffer& b : shared) if (!strcmp(b.name, name)) return b.p;
  shared.push_back(new_buffer(name, n, true));
#ifdef MSL_TRACE
  shared_regions.push_back({TG, std::vector<Cell>(n), {}});
#endif
  size_t total = 0;
  for (Buffer& b : shared) total += b.n;
  if (total > 32768) say("threadgroup-memory", nullptr, "%zu bytes, more than the 32768 of Apple GPUs", total);
  return shared.back().p;
}

#ifdef MSL_TRACE
#include "trace_hooks.h"
#endif

// ---- called by the harness ------------------------------------------------------
// Copies the buffers in, runs the grid, copies outputs back. What an output holds
// before is the caller's choice (MLX does not clear outputs: use NaN).
// order: 0 lanes ascending, 1 descending, 2 shuffled before each round.
// Returns 0 if clean, 1 if msl_report() has something to say.
extern "C" int msl_launch(int count, const char** names, void** data, const size_t* sizes, const int* writable,
                          const unsigned* grid, const unsigned* group, int order, unsigned seed) {
  report.clear(), seen.clear(), aborted = false, switches = 0;
  if (group[0] * group[1] * group[2] > 1024) say("threadgroup-size", nullptr, "more than 1024 threads");
  drop(buffers);
  for (int i = 0; i < count; i++) {
    buffers.push_back(new_buffer(names[i], sizes[i], writable[i] != 0));
    args[i] = buffers[i].p;
    memcpy(args[i], data[i], sizes[i]);
  }
#ifdef MSL_TRACE
  dl_iterate_phdr(find_module, nullptr);
  buffer_regions.clear();
  for (Buffer& b : buffers)
    buffer_regions.push_back(b.writable ? Region{DEV, std::vector<Cell>(b.n), {}}
                                        : Region{DEV, {}, std::vector<uint16_t>(b.n)});
#endif
  static std::vector<char*> stacks;
  std::mt19937 rng(seed);
  auto up = [](unsigned a, unsigned b) { return (a + b - 1) / b; };
  msl_u3 groups = {up(grid[0], group[0]), up(grid[1], group[1]), up(grid[2], group[2])};
  group_no = 0;
  for (unsigned gz = 0; gz < groups.z; gz++)
    for (unsigned gy = 0; gy < groups.y; gy++)
      for (unsigned gx = 0; gx < groups.x && !aborted; gx++, group_no++) {
        // MLX calls dispatchThreads: a threadgroup at the edge is cut to the grid.
        auto cut = [](unsigned g, unsigned tg, unsigned at) { unsigned left = g - at * tg; return left < tg ? left : tg; };
        msl_u3 s = {cut(grid[0], group[0], gx), cut(grid[1], group[1], gy), cut(grid[2], group[2], gz)};
        unsigned n = s.x * s.y * s.z;
        drop(shared);
#ifdef MSL_TRACE
        shared_regions.clear();
#endif
        lanes.resize(n);
        for (unsigned i = 0; i < n; i++) {
          Lane& l = lanes[i];
          if (stacks.size() <= i) {
            char* m = (char*)mmap(nullptr, STACK + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            mprotect(m, 4096, PROT_NONE);  // a lane that runs out of stack faults
            stacks.push_back(m + 4096);
          }
          l.stack = stacks[i];
          l.state = RUN, l.parity = 0, l.asan_stack = nullptr;
          memset(l.epoch, 0, sizeof l.epoch);
          memset(l.simd_epoch, 0, sizeof l.simd_epoch);
          msl_u3 t = {i % s.x, i / s.x % s.y, i / s.x / s.y};
          unsigned full = group[0] * group[1] * group[2];
          msl_ids& d = l.id;
          d.thread_position_in_threadgroup = t;
          d.threadgroup_position_in_grid = {gx, gy, gz};
          d.thread_position_in_grid = {gx * group[0] + t.x, gy * group[1] + t.y, gz * group[2] + t.z};
          d.threads_per_threadgroup = s;
          d.dispatch_threads_per_threadgroup = {group[0], group[1], group[2]};
          d.threadgroups_per_grid = groups;
          d.threads_per_grid = d.grid_size = {grid[0], grid[1], grid[2]};
          d.grid_origin = {0, 0, 0};
          d.thread_index_in_threadgroup = i;
          d.thread_index_in_simdgroup = i % SIMD;
          d.simdgroup_index_in_threadgroup = i / SIMD;
          d.simdgroups_per_threadgroup = up(n, SIMD);
          d.dispatch_simdgroups_per_threadgroup = up(full, SIMD);
          d.threads_per_simdgroup = d.thread_execution_width = SIMD;
          d.thread_index_in_quadgroup = i % 4;
          d.quadgroup_index_in_threadgroup = i / 4;
          d.quadgroups_per_threadgroup = up(n, 4);
          d.dispatch_quadgroups_per_threadgroup = up(full, 4);
        }
        run_group(order, rng);
      }
  for (int i = 0; i < count; i++)
    if (writable[i]) memcpy(data[i], buffers[i].p, sizes[i]);
  return report.empty() ? 0 : 1;
}
extern "C" const char* msl_report() { return report.c_str(); }
extern "C" unsigned long msl_switches() { return switches; }
// Traced builds: how often each byte of a buffer was read (inputs) or 1 if it was written (outputs).
extern "C" int msl_counts(int i, uint16_t* out) {
#ifdef MSL_TRACE
  for (size_t k = 0; k < buffers[i].n; k++)
    out[k] = buffers[i].writable ? buffer_regions[i].cells[k].written : buffer_regions[i].reads[k];
  return 1;
#else
  (void)i, (void)out;
  return 0;
#endif
}
