// As much of CUDA's driver as Triton asks for. A launch is counted by null_cuda.cpp.
#include <stddef.h>
#include <string.h>

void null_kernel(void);
#define NOTHING(name) int name(void) { return 0; }
#define GIVES(name, type, value, ...) int name(type* to, ##__VA_ARGS__) { *to = value; return 0; }

NOTHING(cuInit) NOTHING(cuCtxSetCurrent) NOTHING(cuFuncSetCacheConfig) NOTHING(cuFuncSetAttribute)
NOTHING(cuCtxSetLimit) NOTHING(cuTensorMapEncodeTiled) NOTHING(cuTensorMapEncodeIm2col) NOTHING(cuDeviceGet)
GIVES(cuCtxGetCurrent, void*, to)
GIVES(cuDevicePrimaryCtxRetain, void*, to)
GIVES(cuModuleLoadData, void*, to)
GIVES(cuModuleGetFunction, void*, to)
GIVES(cuFuncGetAttribute, int, attribute ? 32 : 1024, int attribute)
GIVES(cuOccupancyMaxActiveClusters, int, 1)
GIVES(cuCtxGetLimit, size_t, 0)
GIVES(cuDriverGetVersion, int, 13000)
GIVES(cuDeviceGetAttribute, int, attribute == 10 ? 32 : attribute == 97 ? 232448 : attribute == 12 ? 65536 : 1024,
      int attribute)
int cuGetErrorString(int code, const char** text) { *text = "null"; return 0; }
int cuLaunchKernelEx(void) { null_kernel(); return 0; }
int cuPointerGetAttribute(void* data, int attribute, unsigned long long address) { memcpy(data, &address, 8); return 0; }
