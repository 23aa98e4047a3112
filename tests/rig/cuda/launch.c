/* Launches, synchronisation and graphs: the calls a tracer looks at. Every X has an X_ptsz twin at
 * its own address, as in the real driver: the two differ in what stream 0 means. */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

API CUfunction rigKernelCreate(const char *name) {
  struct CUfunc_st *f = calloc(1, sizeof(*f));
  if (f) strncpy(f->name, name ? name : "kernel", sizeof(f->name) - 1);
  return f;
}

API CUfunction rigKernelCreateScaled(const char *name) {
  struct CUfunc_st *f = rigKernelCreate(name);
  if (f) f->scaled = true;
  return f;
}

API CUresult cuFuncGetName(const char **name, CUfunction f) {
  if (!name || !f) return CUDA_ERROR_INVALID_VALUE;
  *name = f->name;
  return CUDA_SUCCESS;
}

static CUresult launch(struct CUstream_st *s, CUfunction f, void **params) {
  if (!f) return CUDA_ERROR_INVALID_HANDLE;
  uint64_t ns = params && params[0] ? *(const uint64_t *)params[0] : 0;
  const double *scale = f->scaled ? *(const double *const *)params[1] : NULL;
  uint32_t correlation = injectCorrelation();
  CUresult result = streamPush(s, (struct op){.kind = OP_KERNEL,
                                              .ns = ns,
                                              .scale = scale,
                                              .name = f->name,
                                              .correlation = correlation});
  injectLaunched(correlation, false);
  return result;
}

#define KERNEL_ARGS                                                                             \
  CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,   \
      unsigned smem, CUstream stream, void **params, void **extra

static bool emptyGrid(unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz) {
  return !gx || !gy || !gz || !bx || !by || !bz;
}

API CUresult cuLaunchKernel(KERNEL_ARGS) {
  (void)smem, (void)extra;
  if (emptyGrid(gx, gy, gz, bx, by, bz)) return CUDA_ERROR_INVALID_VALUE;
  return launch(streamResolve(stream, false), f, params);
}

API CUresult cuLaunchKernel_ptsz(KERNEL_ARGS) {
  (void)smem, (void)extra;
  if (emptyGrid(gx, gy, gz, bx, by, bz)) return CUDA_ERROR_INVALID_VALUE;
  return launch(streamResolve(stream, true), f, params);
}

API CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **params,
                              void **extra) {
  (void)extra;
  if (!config) return CUDA_ERROR_INVALID_VALUE;
  return launch(streamResolve(config->hStream, false), f, params);
}

API CUresult cuLaunchKernelEx_ptsz(const CUlaunchConfig *config, CUfunction f, void **params,
                                   void **extra) {
  (void)extra;
  if (!config) return CUDA_ERROR_INVALID_VALUE;
  return launch(streamResolve(config->hStream, true), f, params);
}

static CUresult hostFunc(struct CUstream_st *s, CUhostFn fn, void *arg) {
  if (!fn) return CUDA_ERROR_INVALID_VALUE;
  return streamPush(
      s, (struct op){.kind = OP_HOST, .fn = fn, .arg = arg, .name = injectTakeName()});
}

API CUresult cuLaunchHostFunc(CUstream stream, CUhostFn fn, void *arg) {
  return hostFunc(streamResolve(stream, false), fn, arg);
}

API CUresult cuLaunchHostFunc_ptsz(CUstream stream, CUhostFn fn, void *arg) {
  return hostFunc(streamResolve(stream, true), fn, arg);
}

API CUresult cuStreamCreate(CUstream *stream, unsigned flags) {
  if (!stream) return CUDA_ERROR_INVALID_VALUE;
  *stream = streamNew(flags);
  return *stream ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

API CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority) {
  (void)priority;
  return cuStreamCreate(stream, flags);
}

API CUresult cuStreamDestroy_v2(CUstream stream) {
  if ((uintptr_t)stream <= 2) return CUDA_ERROR_INVALID_HANDLE;
  streamFree(stream);
  return CUDA_SUCCESS;
}

API CUresult cuStreamDestroy(CUstream stream) { return cuStreamDestroy_v2(stream); }

API CUresult cuStreamSynchronize(CUstream stream) {
  return streamDrain(streamResolve(stream, false));
}

API CUresult cuStreamSynchronize_ptsz(CUstream stream) {
  return streamDrain(streamResolve(stream, true));
}

API CUresult cuStreamQuery(CUstream stream) { return streamIdle(streamResolve(stream, false)); }

API CUresult cuStreamQuery_ptsz(CUstream stream) { return streamIdle(streamResolve(stream, true)); }

API CUresult cuCtxSynchronize(void) { return streamDrainAll(false); }

/* Capture: single-stream. Kernels and host functions of the stream become nodes. */
API CUresult cuStreamBeginCapture_v2(CUstream stream, int mode) {
  (void)mode;
  if ((uintptr_t)stream <= 1) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  return streamCaptureBegin(streamResolve(stream, false));
}

API CUresult cuStreamBeginCapture(CUstream stream, int mode) {
  return cuStreamBeginCapture_v2(stream, mode);
}

API CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph) {
  if (!graph) return CUDA_ERROR_INVALID_VALUE;
  return streamCaptureEnd(streamResolve(stream, false), graph);
}

API CUresult cuStreamIsCapturing(CUstream stream, int *status) {
  if (!status) return CUDA_ERROR_INVALID_VALUE;
  *status = streamCapturing(streamResolve(stream, false));
  return CUDA_SUCCESS;
}

API CUresult cuStreamIsCapturing_ptsz(CUstream stream, int *status) {
  if (!status) return CUDA_ERROR_INVALID_VALUE;
  *status = streamCapturing(streamResolve(stream, true));
  return CUDA_SUCCESS;
}

API CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph,
                                         unsigned long long flags) {
  (void)flags;
  if (!exec || !graph) return CUDA_ERROR_INVALID_VALUE;
  struct CUgraphExec_st *made = calloc(1, sizeof(*made));
  if (!made) return CUDA_ERROR_OUT_OF_MEMORY;
  for (size_t i = 0; i < graph->ops.len; i++) {
    if (!opListAdd(&made->ops, &graph->ops.items[i])) return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *exec = made;
  return CUDA_SUCCESS;
}

static CUresult launchGraph(CUgraphExec exec, struct CUstream_st *s) {
  if (!exec) return CUDA_ERROR_INVALID_HANDLE;
  uint32_t correlation = injectCorrelation();
  CUresult result =
      streamPush(s, (struct op){.kind = OP_GRAPH, .graph = exec, .correlation = correlation});
  injectLaunched(correlation, true);
  return result;
}

API CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream) {
  return launchGraph(exec, streamResolve(stream, false));
}

API CUresult cuGraphLaunch_ptsz(CUgraphExec exec, CUstream stream) {
  return launchGraph(exec, streamResolve(stream, true));
}

API CUresult cuGraphDestroy(CUgraph graph) {
  if (!graph) return CUDA_ERROR_INVALID_VALUE;
  opListFree(&graph->ops);
  free(graph);
  return CUDA_SUCCESS;
}

API CUresult cuGraphExecDestroy(CUgraphExec exec) {
  if (!exec) return CUDA_ERROR_INVALID_VALUE;
  opListFree(&exec->ops);
  free(exec);
  return CUDA_SUCCESS;
}
