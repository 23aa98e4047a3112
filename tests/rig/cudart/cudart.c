/* A thin libcudart.so.12: each call goes on to libcuda through cuGetProcAddress, as the real
 * runtime's do, so a tracer of both layers sees one launch twice. The default-stream and the
 * per-thread (_ptsz) entries ask the driver for different functions. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>

#include "rigcuda.h"

#define API __attribute__((visibility("default")))

typedef int cudaError_t;
typedef struct {
  unsigned x, y, z;
} dim3;

typedef struct {
  dim3 grid, block;
  size_t smem;
  CUstream stream;
  void *attrs;
  unsigned numAttrs;
} cudaLaunchConfig_t;
_Static_assert(offsetof(cudaLaunchConfig_t, smem) == 24, "cudaLaunchConfig_t ABI");
_Static_assert(offsetof(cudaLaunchConfig_t, stream) == 32, "cudaLaunchConfig_t ABI");

enum { cudaSuccess = 0, cudaErrorInsufficientDriver = 35, cudaErrorNoDevice = 100 };

typedef CUresult (*launchFn)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                             unsigned, CUstream, void **, void **);
typedef CUresult (*launchExFn)(const CUlaunchConfig *, CUfunction, void **, void **);

static struct {
  CUresult (*init)(unsigned);
  launchFn launch[2];
  launchExFn launchEx[2];
  CUresult (*graphLaunch[2])(CUgraphExec, CUstream);
  CUresult (*streamSync[2])(CUstream);
  CUresult (*streamCreate)(CUstream *, unsigned);
  CUresult (*streamDestroy)(CUstream);
  CUresult (*eventSync)(CUevent);
  CUresult (*ctxSync)(void);
  CUresult (*toHost)(void *, CUdeviceptr, size_t);
  CUresult (*toDevice)(CUdeviceptr, const void *, size_t);
  CUresult (*count)(int *);
  CUresult (*retain)(CUcontext *, CUdevice);
  CUresult (*setContext)(CUcontext);
  CUresult (*alloc)(CUdeviceptr *, size_t);
  CUresult (*release)(CUdeviceptr);
} cu;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static cudaError_t state = cudaErrorInsufficientDriver;
static __typeof__(&cuGetProcAddress_v2) get;

static void bind(void *slot, const char *name, uint64_t flags) {
  void *fn = NULL;
  if (get(name, &fn, 12080, flags, NULL)) fn = NULL;
  memcpy(slot, &fn, sizeof(fn));
}

static void bindBoth(void *slots, const char *name) {
  bind(slots, name, 0);
  bind((char *)slots + sizeof(void *), name, CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM);
}

static void load(void) {
  void *lib = dlopen("libcuda.so.1", RTLD_NOW);
  if (!lib) return;
  void *found = dlsym(lib, "cuGetProcAddress_v2");
  memcpy(&get, &found, sizeof(get));
  if (!get) return;
  bind(&cu.init, "cuInit", 0);
  bindBoth(cu.launch, "cuLaunchKernel");
  bindBoth(cu.launchEx, "cuLaunchKernelEx");
  bindBoth(cu.graphLaunch, "cuGraphLaunch");
  bindBoth(cu.streamSync, "cuStreamSynchronize");
  bind(&cu.streamCreate, "cuStreamCreate", 0);
  bind(&cu.streamDestroy, "cuStreamDestroy", 0);
  bind(&cu.eventSync, "cuEventSynchronize", 0);
  bind(&cu.ctxSync, "cuCtxSynchronize", 0);
  bind(&cu.toHost, "cuMemcpyDtoH", 0);
  bind(&cu.toDevice, "cuMemcpyHtoD", 0);
  bind(&cu.count, "cuDeviceGetCount", 0);
  bind(&cu.retain, "cuDevicePrimaryCtxRetain", 0);
  bind(&cu.setContext, "cuCtxSetCurrent", 0);
  bind(&cu.alloc, "cuMemAlloc", 0);
  bind(&cu.release, "cuMemFree", 0);
  state = cu.init(0) ? cudaErrorNoDevice : cudaSuccess;
}

static cudaError_t ready(void) {
  pthread_once(&once, load);
  return state;
}

static cudaError_t launch(int ptsz, const void *func, dim3 grid, dim3 block, void **args,
                          size_t smem, CUstream stream) {
  cudaError_t error = ready();
  if (error) return error;
  return cu.launch[ptsz]((CUfunction)(uintptr_t)func, grid.x, grid.y, grid.z, block.x, block.y,
                         block.z, (unsigned)smem, stream, args, NULL);
}

API cudaError_t cudaLaunchKernel(const void *func, dim3 grid, dim3 block, void **args, size_t smem,
                                 CUstream stream) {
  return launch(0, func, grid, block, args, smem, stream);
}

API cudaError_t cudaLaunchKernel_ptsz(const void *func, dim3 grid, dim3 block, void **args,
                                      size_t smem, CUstream stream) {
  return launch(1, func, grid, block, args, smem, stream);
}

static cudaError_t launchEx(int ptsz, const cudaLaunchConfig_t *config, const void *func,
                            void **args) {
  cudaError_t error = ready();
  if (error) return error;
  if (!config) return 1;
  CUlaunchConfig wide = {config->grid.x,  config->grid.y,  config->grid.z,
                         config->block.x, config->block.y, config->block.z,
                         (unsigned)config->smem, config->stream, config->attrs, config->numAttrs};
  return cu.launchEx[ptsz](&wide, (CUfunction)(uintptr_t)func, args, NULL);
}

API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *func,
                                    void **args) {
  return launchEx(0, config, func, args);
}

API cudaError_t cudaLaunchKernelExC_ptsz(const cudaLaunchConfig_t *config, const void *func,
                                         void **args) {
  return launchEx(1, config, func, args);
}

#define FORWARD(name, params, call)                                                              \
  API cudaError_t name params {                                                                  \
    cudaError_t error = ready();                                                                 \
    return error ? error : call;                                                                 \
  }

FORWARD(cudaGraphLaunch, (CUgraphExec exec, CUstream stream), cu.graphLaunch[0](exec, stream))
FORWARD(cudaGraphLaunch_ptsz, (CUgraphExec exec, CUstream stream), cu.graphLaunch[1](exec, stream))
FORWARD(cudaStreamSynchronize, (CUstream stream), cu.streamSync[0](stream))
FORWARD(cudaStreamSynchronize_ptsz, (CUstream stream), cu.streamSync[1](stream))
FORWARD(cudaStreamCreate, (CUstream *stream), cu.streamCreate(stream, 0))
FORWARD(cudaStreamDestroy, (CUstream stream), cu.streamDestroy(stream))
FORWARD(cudaEventSynchronize, (CUevent event), cu.eventSync(event))
FORWARD(cudaDeviceSynchronize, (void), cu.ctxSync())
FORWARD(cudaGetDeviceCount, (int *count), cu.count(count))

API cudaError_t cudaSetDevice(int device) {
  CUcontext context;
  cudaError_t error = ready();
  if (!error) error = cu.retain(&context, device);
  return error ? error : cu.setContext(context);
}

API cudaError_t cudaMalloc(void **ptr, size_t bytes) {
  CUdeviceptr made = 0;
  cudaError_t error = ready();
  if (!error) error = cu.alloc(&made, bytes);
  if (!error) *ptr = (void *)(uintptr_t)made;
  return error;
}

API cudaError_t cudaFree(void *ptr) {
  cudaError_t error = ready();
  return error ? error : cu.release((CUdeviceptr)(uintptr_t)ptr);
}

/* kind: 1 host to device, 2 device to host; the others go the second way too, all of them block. */
API cudaError_t cudaMemcpy(void *dst, const void *src, size_t bytes, int kind) {
  cudaError_t error = ready();
  if (error) return error;
  if (kind == 1) return cu.toDevice((CUdeviceptr)(uintptr_t)dst, src, bytes);
  return cu.toHost(dst, (CUdeviceptr)(uintptr_t)src, bytes);
}

API cudaError_t cudaGetLastError(void) { return cudaSuccess; }
