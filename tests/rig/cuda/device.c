/* Devices, contexts, memory and the symbol lookup of the stand-in driver. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

/* A context is nothing but its device; its address is the handle. */
struct CUctx_st {
  int device;
};

static struct CUctx_st contexts[RIG_MAX_GPUS];
static __thread int device;

int currentDevice(void) { return device; }

/* CUDA_VISIBLE_DEVICES renumbers devices; only the plain list of ordinals is understood. */
static int visible(int ordinal, int *physical) {
  const char *list = getenv("CUDA_VISIBLE_DEVICES");
  int count = rigGpuCount();
  if (!list) {
    *physical = ordinal;
    return count;
  }
  int seen = 0;
  while (*list) {
    char *end;
    long gpu = strtol(list, &end, 10);
    if (end == list || gpu < 0 || gpu >= count) break;
    if (seen++ == ordinal) *physical = (int)gpu;
    list = *end == ',' ? end + 1 : end;
  }
  return seen;
}

API CUresult cuInit(unsigned flags) {
  (void)flags;
  int unused;
  injectOpen();
  for (int i = 0; i < RIG_MAX_GPUS; i++) contexts[i].device = i;
  return visible(0, &unused) > 0 ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

API CUresult cuDriverGetVersion(int *version) {
  if (!version) return CUDA_ERROR_INVALID_VALUE;
  *version = 12080;
  return CUDA_SUCCESS;
}

API CUresult cuDeviceGetCount(int *count) {
  int unused;
  if (!count) return CUDA_ERROR_INVALID_VALUE;
  *count = visible(0, &unused);
  return CUDA_SUCCESS;
}

API CUresult cuDeviceGet(CUdevice *out, int ordinal) {
  int unused;
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  if (ordinal < 0 || ordinal >= visible(0, &unused)) return CUDA_ERROR_INVALID_DEVICE;
  *out = ordinal;
  return CUDA_SUCCESS;
}

API CUresult cuDeviceGetName(char *name, int len, CUdevice d) {
  (void)d;
  if (!name || len <= 0) return CUDA_ERROR_INVALID_VALUE;
  snprintf(name, (size_t)len, "Rig GPU");
  return CUDA_SUCCESS;
}

API CUresult cuDeviceGetPCIBusId(char *out, int len, CUdevice d) {
  int physical = -1;
  if (!out || len < 13) return CUDA_ERROR_INVALID_VALUE;
  if (d < 0 || d >= visible(d, &physical)) return CUDA_ERROR_INVALID_DEVICE;
  snprintf(out, (size_t)len, "0000:%02X:00.0", rigGpuBus(physical));
  return CUDA_SUCCESS;
}

API CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice d) {
  (void)d;
  if (!bytes) return CUDA_ERROR_INVALID_VALUE;
  *bytes = (size_t)80 << 30;
  return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext *ctx, CUdevice d) {
  if (!ctx) return CUDA_ERROR_INVALID_VALUE;
  if (d < 0 || d >= RIG_MAX_GPUS) return CUDA_ERROR_INVALID_DEVICE;
  *ctx = &contexts[d];
  return CUDA_SUCCESS;
}

API CUresult cuCtxSetCurrent(CUcontext ctx) {
  if (ctx && (ctx < contexts || ctx >= contexts + RIG_MAX_GPUS)) return CUDA_ERROR_INVALID_CONTEXT;
  device = ctx ? (int)(ctx - contexts) : 0;
  return CUDA_SUCCESS;
}

API CUresult cuCtxGetCurrent(CUcontext *ctx) {
  if (!ctx) return CUDA_ERROR_INVALID_VALUE;
  *ctx = &contexts[device];
  return CUDA_SUCCESS;
}

API CUresult cuCtxGetDevice(CUdevice *out) {
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  *out = device;
  return CUDA_SUCCESS;
}

API CUresult cuMemAlloc_v2(CUdeviceptr *ptr, size_t bytes) {
  void *made = NULL;
  if (!ptr || !bytes) return CUDA_ERROR_INVALID_VALUE;
  if (posix_memalign(&made, 256, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  *ptr = (CUdeviceptr)(uintptr_t)made;
  return CUDA_SUCCESS;
}

/* Freeing waits for the device, as the real call does. */
API CUresult cuMemFree_v2(CUdeviceptr ptr) {
  CUresult result = ptr ? streamDrainAll(false) : CUDA_SUCCESS;
  if (!result) free((void *)(uintptr_t)ptr);
  return result;
}

API CUresult cuMemcpyDtoH_v2(void *dst, CUdeviceptr src, size_t bytes) {
  CUresult result = streamDrainAll(true);
  if (!result && bytes) memcpy(dst, (const void *)(uintptr_t)src, bytes);
  return result;
}

API CUresult cuMemcpyHtoD_v2(CUdeviceptr dst, const void *src, size_t bytes) {
  CUresult result = streamDrainAll(true);
  if (!result && bytes) memcpy((void *)(uintptr_t)dst, src, bytes);
  return result;
}

static CUresult copyAsync(struct CUstream_st *s, CUdeviceptr dst, CUdeviceptr src, size_t bytes) {
  return streamPush(s, (struct op){.kind = OP_COPY,
                                   .dst = (void *)(uintptr_t)dst,
                                   .src = (const void *)(uintptr_t)src,
                                   .bytes = bytes});
}

API CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream) {
  return copyAsync(streamResolve(stream, false), dst, src, bytes);
}

API CUresult cuMemcpyAsync_ptsz(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream) {
  return copyAsync(streamResolve(stream, true), dst, src, bytes);
}

API CUresult cuGetErrorString(CUresult code, const char **text) {
  if (!text) return CUDA_ERROR_INVALID_VALUE;
  *text = code ? "rig driver error" : "no error";
  return CUDA_SUCCESS;
}

/* Exactly the exported addresses come out: probes on exports see indirect calls too. */
static void *lookUp(const char *symbol, bool ptsz) {
  static void *self;
  static const char *const suffixes[] = {"_v2_ptsz", "_ptsz", "_v2", ""};
  if (!self) {
    Dl_info info;
    if (!dladdr((void *)(uintptr_t)&lookUp, &info)) return NULL;
    self = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  }
  for (int i = ptsz ? 0 : 2; self && i < 4; i++) {
    char name[128];
    if (snprintf(name, sizeof(name), "%s%s", symbol, suffixes[i]) >= (int)sizeof(name)) continue;
    void *found = dlsym(self, name);
    if (found) return found;
  }
  return NULL;
}

API CUresult cuGetProcAddress_v2(const char *symbol, void **fn, int version, uint64_t flags,
                                 int *status) {
  (void)version;
  if (!symbol || !fn) return CUDA_ERROR_INVALID_VALUE;
  *fn = lookUp(symbol, flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM);
  if (status) *status = *fn ? 0 : 1; /* CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND */
  return *fn ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

API CUresult cuGetProcAddress(const char *symbol, void **fn, int version, uint64_t flags) {
  return cuGetProcAddress_v2(symbol, fn, version, flags, NULL);
}
