// Includes BODY once for each instruction set, in a namespace of that name, with LEVEL 0 to 3 and the vectors of
// vectors_cpu.h. A function of the library takes the level as an argument; `dispatch` of ops/cpu.py selects the highest.
// Do not use templates of the standard library in a BODY: the linker would merge instances of different levels.
namespace portable {
#define LEVEL 0
#include "vectors_cpu.h"
#include BODY
#undef LEVEL
}  // namespace portable

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define HAS_X86_LEVELS
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi,bmi2,popcnt")
namespace avx2 {
#define LEVEL 1
#include "vectors_cpu.h"
#include BODY
#undef LEVEL
}  // namespace avx2
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
namespace avx512 {
#define LEVEL 2
#include "vectors_cpu.h"
#include BODY
#undef LEVEL
}  // namespace avx512
#pragma GCC target("avx512bf16")
namespace avx512bf16 {
#define LEVEL 3
#include "vectors_cpu.h"
#include BODY
#undef LEVEL
}  // namespace avx512bf16
#pragma GCC pop_options
#define AT_LEVEL(level, call)                                                                            \
  ((level) >= 3 ? avx512bf16::call : (level) == 2 ? avx512::call : (level) == 1 ? avx2::call : portable::call)
#else
#define AT_LEVEL(level, call) portable::call
#endif
