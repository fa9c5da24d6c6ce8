// Matrix products on a CPU, for ctypes.
#include "cpu.h"

namespace {
#define BODY "linear_cpu.h"
#include "every_isa.h"
#undef BODY
}  // namespace
