// trace_hooks.h: what the compiler's instrumentation calls. Part of runtime.cpp.
#pragma once
// GCC's -fsanitize=thread calls these around each load and store.
#define PC (const char*)__builtin_return_address(0) - 1
#define HOOK(n)                                                                        \
  extern "C" void __tsan_read##n(void* p) { check_access(p, n, false, true, PC); }            \
  extern "C" void __tsan_write##n(void* p) { check_access(p, n, true, true, PC); }            \
  extern "C" void __tsan_unaligned_read##n(void* p) { check_access(p, n, false, false, PC); } \
  extern "C" void __tsan_unaligned_write##n(void* p) { check_access(p, n, true, false, PC); }
HOOK(1) HOOK(2) HOOK(4) HOOK(8) HOOK(16)
extern "C" void __tsan_read_range(void* p, size_t n) { check_access(p, n, false, false, PC); }
extern "C" void __tsan_write_range(void* p, size_t n) { check_access(p, n, true, false, PC); }
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}

// And -fsanitize=alignment,bounds,shift these; each gets its place in the source first.
struct Place { const char* file; uint32_t line, col; };
static void undefined(const char* kind, const Place* s, const void* pc) {
  say(kind, pc, "%s:%u:%u", s->file, s->line, s->col);
}
#define UB1(name, kind) extern "C" void __ubsan_handle_##name(Place* s, void*) { undefined(kind, s, PC); }
#define UB2(name, kind) extern "C" void __ubsan_handle_##name(Place* s, void*, void*) { undefined(kind, s, PC); }
UB1(type_mismatch_v1, "misaligned") UB1(out_of_bounds, "index-out-of-bounds")
UB2(shift_out_of_bounds, "shift-out-of-range") UB2(divrem_overflow, "division-by-zero")
