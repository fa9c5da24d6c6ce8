// Tree attention on a CPU, for ctypes.
#include "cpu.h"
