/* A pretended NVIDIA driver: its management library (NVML) tells of NVML_DEVICES GPUs (default 4) of 80 GiB and compute capability 9.0, its
 * CUDA library has no device. With both, vLLM takes its CUDA path up to the first call of CUDA, which fails.
 * Built as libnvidia-ml.so.1 and as libcuda.so.1. Values of the enumerations are those of nvml.h and cuda.h. */
#include <stdio.h>
#include <stdlib.h>

typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned int version; unsigned long long total, reserved, free, used; } memory_v2_t;

static const unsigned long long GPU_BYTES = 80ULL << 30;
enum { SUCCESS = 0, INVALID_ARGUMENT = 2 };

static unsigned int devices(void) {
  const char *number = getenv("NVML_DEVICES");
  return number ? (unsigned int)atoi(number) : 4;
}

int nvmlInit_v2(void) { return SUCCESS; }
int nvmlInit(void) { return SUCCESS; }
int nvmlInitWithFlags(unsigned int flags) { (void)flags; return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { (void)code; return "pretended NVML"; }
int nvmlSystemGetDriverVersion(char *text, unsigned int size) { snprintf(text, size, "580.0"); return SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = devices(); return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **handle) {
  *handle = (void *)(unsigned long)(index + 1);
  return index < devices() ? SUCCESS : INVALID_ARGUMENT;
}
int nvmlDeviceGetName(void *handle, char *text, unsigned int size) { (void)handle; snprintf(text, size, "NVIDIA H100 80GB HBM3"); return SUCCESS; }
int nvmlDeviceGetUUID(void *handle, char *text, unsigned int size) { snprintf(text, size, "GPU-%lu", (unsigned long)handle); return SUCCESS; }
int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) { (void)handle; *major = 9; *minor = 0; return SUCCESS; }
int nvmlDeviceGetMemoryInfo(void *handle, memory_t *m) {
  (void)handle;
  m->total = m->free = GPU_BYTES;
  m->used = 0;
  return SUCCESS;
}
int nvmlDeviceGetMemoryInfo_v2(void *handle, memory_v2_t *m) {
  (void)handle;
  m->total = m->free = GPU_BYTES;
  m->used = m->reserved = 0;
  return SUCCESS;
}
int nvmlDeviceGetP2PStatus(void *one, void *other, int capability, int *status) {
  (void)one; (void)other; (void)capability;
  *status = 0;
  return SUCCESS;
}

enum { CUDA_ERROR_NO_DEVICE = 100, CUDA_ERROR_NOT_FOUND = 500 };

int cuInit(unsigned int flags) { (void)flags; return CUDA_ERROR_NO_DEVICE; }
int cuDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }
int cuPointerGetAttribute(void *value, int attribute, unsigned long long pointer) {
  (void)value; (void)attribute; (void)pointer;
  return CUDA_ERROR_NO_DEVICE;
}
int cuTensorMapEncodeTiled(void) { return CUDA_ERROR_NO_DEVICE; }
int cuGetProcAddress_v2(const char *symbol, void **function, int version, unsigned long long flags, int *status) {
  (void)symbol; (void)version; (void)flags;
  *function = NULL;
  if (status) *status = 1; /* CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND */
  return CUDA_ERROR_NOT_FOUND;
}
