// metal_shim.h: the part of the Metal Shading Language that our kernels use,
// for g++ on a CPU. Include it, then the exact text that MLX generates.
//
// It includes no C or C++ library header on purpose: <cmath>, <thread> and
// friends would put exp, select, y0, uint, std::thread ... in scope, and a
// kernel could then compile here by accident. Everything that has state (lanes,
// barriers, checking) is in runtime.cpp, which never sees these macros.
#pragma once
#pragma GCC system_header  // allows operator""h, silences our own warnings

// ---- scalar types --------------------------------------------------------
typedef __INT8_TYPE__ int8_t;     typedef __UINT8_TYPE__ uint8_t;
typedef __INT16_TYPE__ int16_t;   typedef __UINT16_TYPE__ uint16_t;
typedef __INT32_TYPE__ int32_t;   typedef __UINT32_TYPE__ uint32_t;
typedef __INT64_TYPE__ int64_t;   typedef __UINT64_TYPE__ uint64_t;
typedef __SIZE_TYPE__ size_t;
typedef unsigned char uchar;      typedef unsigned short ushort;
typedef unsigned int uint;        typedef unsigned long ulong;
typedef _Float16 half;
static_assert(sizeof(half) == 2 && sizeof(long) == 8, "as Metal has them");
constexpr half operator""h(long double v) { return (half)v; }
constexpr half operator""H(long double v) { return (half)v; }

// ---- runtime interface (runtime.cpp) ----------------------------------
#include "abi.h"

namespace metal {

// ---- bit casts -------------------------------------------------------------
template <class To, class From>
inline To as_type(From v) {
  static_assert(sizeof(To) == sizeof(From), "as_type<> needs equal sizes");
  To r;
  __builtin_memcpy(&r, &v, sizeof r);
  return r;
}

// Storage and conversion only; arithmetic goes through float (Metal rounds
// every bfloat operation, so this is more exact than a GPU).
struct bfloat {
  uint16_t bits;
  bfloat() = default;
  bfloat(float f) {
    uint32_t u = as_type<uint32_t>(f);
    bits = (f != f) ? 0x7fc0 : uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
  }
  operator float() const { return as_type<float>(uint32_t(bits) << 16); }
};

// ---- vectors ---------------------------------------------------------------
template <class T, int N> struct vec;

// v.xy, v.zw, v.xyz: a view of elements A.. of the vector it lives in.
template <class T, int N, int A>
struct swizzle {
  T e[4];
  operator vec<T, N>() const { vec<T, N> r; for (int i = 0; i < N; i++) r.e[i] = e[A + i]; return r; }
  void operator=(vec<T, N> v) { for (int i = 0; i < N; i++) e[A + i] = v.e[i]; }
};

#if MSL_CHECK_SPACE  // lets a vector be loaded from and stored to a `volatile` space
#define MSL_VOLATILE_COPY                                                       \
  vec(const vec&) = default;                                                    \
  vec(const volatile vec& v) { for (int i = 0; i < size; i++) e[i] = v.e[i]; }  \
  vec& operator=(const vec&) = default;                                         \
  vec& operator=(const volatile vec& v) { return *this = vec(v); }              \
  void operator=(const vec& v) volatile { for (int i = 0; i < size; i++) e[i] = v.e[i]; } \
  volatile T& operator[](int i) volatile { return e[i]; }                       \
  T operator[](int i) const volatile { return e[i]; }
#define MSL_VOLATILE_OP(op) friend void operator op##=(volatile vec & a, vec b) { a = vec(a) op b; }
#else
#define MSL_VOLATILE_COPY
#define MSL_VOLATILE_OP(op)
#endif
#define MSL_BIN(op) \
  MSL_VOLATILE_OP(op) \
  friend vec operator op(vec a, vec b) { vec r; for (int i = 0; i < size; i++) r.e[i] = T(a.e[i] op b.e[i]); return r; } \
  friend vec& operator op##=(vec & a, vec b) { return a = a op b; }
#define MSL_CMP(op) \
  friend vec<bool, size> operator op(vec a, vec b) { vec<bool, size> r; for (int i = 0; i < size; i++) r.e[i] = a.e[i] op b.e[i]; return r; }
#define MSL_VEC(N, FIELDS, ...)                                                 \
  template <class T> struct alignas((N == 3 ? 4 : N) * sizeof(T)) vec<T, N> {   \
    static constexpr int size = N;                                              \
    union { T e[N]; struct { T FIELDS; }; __VA_ARGS__ };                        \
    vec() = default;                                                            \
    MSL_VOLATILE_COPY                                                           \
    vec(T s) { for (int i = 0; i < N; i++) e[i] = s; }                          \
    template <class U> explicit vec(vec<U, N> v) { for (int i = 0; i < N; i++) e[i] = T(v.e[i]); } \
    T& operator[](int i) { return e[i]; }                                       \
    T operator[](int i) const { return e[i]; }                                  \
    vec operator-() const { vec r; for (int i = 0; i < N; i++) r.e[i] = -e[i]; return r; } \
    MSL_BIN(+) MSL_BIN(-) MSL_BIN(*) MSL_BIN(/) MSL_BIN(&) MSL_BIN(|) MSL_BIN(^) MSL_BIN(<<) MSL_BIN(>>) \
    MSL_CMP(<) MSL_CMP(>) MSL_CMP(<=) MSL_CMP(>=) MSL_CMP(==) MSL_CMP(!=)
#define MSL_COMMA ,
MSL_VEC(2, x MSL_COMMA y, )
    vec(T a, T b) { x = a; y = b; }
};
MSL_VEC(3, x MSL_COMMA y MSL_COMMA z, swizzle<T, 2, 0> xy;)
    vec(T a, T b, T c) { x = a; y = b; z = c; }
};
MSL_VEC(4, x MSL_COMMA y MSL_COMMA z MSL_COMMA w,
        swizzle<T, 2, 0> xy; swizzle<T, 2, 2> zw; swizzle<T, 3, 0> xyz;)
    vec(T a, T b, T c, T d) { x = a; y = b; z = c; w = d; }
    vec(vec<T, 2> a, vec<T, 2> b) { x = a.x; y = a.y; z = b.x; w = b.y; }
};
#undef MSL_BIN
#undef MSL_CMP
#undef MSL_VEC
#undef MSL_COMMA

template <int N> inline bool any(vec<bool, N> v) { for (int i = 0; i < N; i++) if (v.e[i]) return true; return false; }
template <int N> inline bool all(vec<bool, N> v) { for (int i = 0; i < N; i++) if (!v.e[i]) return false; return true; }
template <class T, int N> inline T dot(vec<T, N> a, vec<T, N> b) {
  T s = T(0);
  for (int i = 0; i < N; i++) s = s + a.e[i] * b.e[i];
  return s;
}

// ---- scalar math -----------------------------------------------------------
#define MSL_FN1(name, builtin)                                \
  inline float name(float x) { return builtin(x); }           \
  inline half name(half x) { return half(builtin(float(x))); }
#define MSL_MATH                                                              \
  MSL_FN1(exp, __builtin_expf) MSL_FN1(exp2, __builtin_exp2f)                 \
  MSL_FN1(log, __builtin_logf) MSL_FN1(log2, __builtin_log2f)                 \
  MSL_FN1(sqrt, __builtin_sqrtf) MSL_FN1(rsqrt, 1.0f / __builtin_sqrtf)       \
  MSL_FN1(tanh, __builtin_tanhf) MSL_FN1(sin, __builtin_sinf) MSL_FN1(cos, __builtin_cosf)
MSL_MATH
namespace fast { MSL_MATH }
namespace precise { MSL_MATH }
MSL_FN1(floor, __builtin_floorf) MSL_FN1(ceil, __builtin_ceilf)
MSL_FN1(rint, __builtin_rintf) MSL_FN1(fabs, __builtin_fabsf)
#undef MSL_FN1
#undef MSL_MATH
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float pow(float a, float b) { return __builtin_powf(a, b); }
template <class T> inline T min(T a, T b) { return b < a ? b : a; }
template <class T> inline T max(T a, T b) { return a < b ? b : a; }
template <class T> inline T clamp(T v, T lo, T hi) { return min(max(v, lo), hi); }
template <class T> inline T abs(T v) { return v < T(0) ? -v : v; }
template <class T> inline T select(T a, T b, bool c) { return c ? b : a; }
inline bool isnan(float x) { return x != x; }
inline uint popcount(uint v) { return uint(__builtin_popcount(v)); }

// ---- SIMD-group functions ----------------------------------------------------
// Each one is a meeting point: every live lane of the simdgroup must arrive, at
// the same source line and with the same uniform argument.
#define MSL_AT int line = __builtin_LINE()
template <class T>
inline msl_view simd_meet(const char* what, T v, uint uniform, int line) {
  static_assert(sizeof(T) <= MSL_SLOT, "payload too large");
  return msl_simd(what, line, uniform, &v, sizeof v);
}
template <class T> inline T msl_get(const msl_view& g, uint lane, const char* what) {
  T r;
  msl_take(&g, lane, what, &r, sizeof r);  // reports an inactive lane
  return r;
}
// Reduction as a butterfly over lane distance 16, 8, 4, 2, 1 (Metal leaves the
// order open). Inactive lanes are left out.
#define MSL_REDUCE(name, expr)                                                  \
  template <class T> inline T name(T v, MSL_AT) {                               \
    msl_view g = simd_meet(#name, v, 0, line);                                  \
    T t[32]; bool has[32];                                                      \
    for (uint i = 0; i < 32; i++) { has[i] = (g.active >> i) & 1; if (has[i]) t[i] = msl_get<T>(g, i, #name); } \
    for (uint d = 16; d; d /= 2)                                                \
      for (uint i = 0; i < d; i++)                                              \
        if (has[i + d]) {                                                       \
          if (has[i]) { T a = t[i], b = t[i + d]; t[i] = (expr); }              \
          else { t[i] = t[i + d]; has[i] = true; }                              \
        }                                                                       \
    return t[0];                                                                \
  }
MSL_REDUCE(simd_sum, a + b)
MSL_REDUCE(simd_product, a * b)
MSL_REDUCE(simd_max, a < b ? b : a)
MSL_REDUCE(simd_min, b < a ? b : a)
inline bool simd_any(bool v, MSL_AT) { return simd_max(int(v), line) != 0; }
inline bool simd_all(bool v, MSL_AT) { return simd_min(int(v), line) != 0; }
#undef MSL_REDUCE

template <class T> inline T simd_broadcast(T v, ushort from, MSL_AT) {
  msl_view g = simd_meet("simd_broadcast", v, from, line);
  return msl_get<T>(g, from, "simd_broadcast");
}
template <class T> inline T simd_broadcast_first(T v, MSL_AT) {
  msl_view g = simd_meet("simd_broadcast_first", v, 0, line);
  return msl_get<T>(g, uint(__builtin_ctz(g.active)), "simd_broadcast_first");
}
template <class T> inline T simd_shuffle(T v, ushort from, MSL_AT) {
  msl_view g = simd_meet("simd_shuffle", v, 0, line);
  return msl_get<T>(g, from, "simd_shuffle");
}
template <class T> inline T simd_shuffle_xor(T v, ushort mask, MSL_AT) {
  msl_view g = simd_meet("simd_shuffle_xor", v, mask, line);
  return msl_get<T>(g, g.lane ^ mask, "simd_shuffle_xor");
}
template <class T> inline T simd_shuffle_down(T v, ushort delta, MSL_AT) {
  msl_view g = simd_meet("simd_shuffle_down", v, delta, line);
  return g.lane + delta < 32 ? msl_get<T>(g, g.lane + delta, "simd_shuffle_down") : v;
}
template <class T> inline T simd_shuffle_up(T v, ushort delta, MSL_AT) {
  msl_view g = simd_meet("simd_shuffle_up", v, delta, line);
  return g.lane >= delta ? msl_get<T>(g, g.lane - delta, "simd_shuffle_up") : v;
}
#define MSL_PREFIX(name, last)                                                  \
  template <class T> inline T name(T v, MSL_AT) {                               \
    msl_view g = simd_meet(#name, v, 0, line);                                  \
    T s = T(0);                                                                 \
    for (uint i = 0; i < (last); i++) if ((g.active >> i) & 1) s = s + msl_get<T>(g, i, #name); \
    return s;                                                                   \
  }
MSL_PREFIX(simd_prefix_inclusive_sum, g.lane + 1)
MSL_PREFIX(simd_prefix_exclusive_sum, g.lane)
#undef MSL_PREFIX

// ---- barriers ------------------------------------------------------------------
enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
inline mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }
inline void threadgroup_barrier(mem_flags f, MSL_AT) { msl_barrier(1, line, uint(f)); }
inline void simdgroup_barrier(mem_flags f, MSL_AT) { msl_barrier(0, line, uint(f)); }
#undef MSL_AT

// ---- vector names -----------------------------------------------------------------
#define MSL_NAMES(T, name) \
  typedef vec<T, 2> name##2; typedef vec<T, 3> name##3; typedef vec<T, 4> name##4;
MSL_NAMES(float, float) MSL_NAMES(half, half) MSL_NAMES(bool, bool)
MSL_NAMES(char, char) MSL_NAMES(uchar, uchar) MSL_NAMES(short, short) MSL_NAMES(ushort, ushort)
MSL_NAMES(int, int) MSL_NAMES(uint, uint) MSL_NAMES(long, long) MSL_NAMES(ulong, ulong)
#undef MSL_NAMES

}  // namespace metal

using namespace metal;  // MLX's bf16.h does this ahead of every custom kernel
typedef half float16_t;
typedef bfloat bfloat16_t;

// ---- address spaces and function qualifiers -------------------------------------
// g++ has no address spaces in C++. To run a kernel, the words vanish. To check
// it (-fsyntax-only, MSL_CHECK_SPACE = 1, 2, 3 in turn), one of them becomes
// `volatile`: a pointer into that space then cannot become one without the word.
#define device
#define constant
#define threadgroup
#define thread
#define kernel
#define METAL_FUNC inline __attribute__((always_inline))
#if MSL_CHECK_SPACE == 1
#undef device
#define device volatile
#elif MSL_CHECK_SPACE == 2
#undef constant
#define constant volatile
#elif MSL_CHECK_SPACE == 3
#undef threadgroup
#define threadgroup volatile
#endif
// The harness turns a declaration `threadgroup T name[dims];` into
// MSL_SHARED(name, [dims], T): one copy for all lanes of the threadgroup.
#define MSL_SHARED(name, dims, ...)                    \
  typedef threadgroup __VA_ARGS__ msl_##name##_t dims; \
  msl_##name##_t& name = *(msl_##name##_t*)msl_shared(#name, sizeof(msl_##name##_t));

#pragma GCC poison double goto virtual new delete try throw typeid dynamic_cast
