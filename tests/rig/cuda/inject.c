/* CUPTI's part: a library named by CUDA_INJECTION64_PATH is loaded at cuInit and told of launches and
 * of kernels, some time after they have run. Work of NCCL, which runs as a host function here, is a
 * kernel to it, under the name that NCCL has given before. */
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

/* As in tests/parcagpu/injection.h. */
struct injectedKernel {
  uint64_t start, end;
  uint32_t device, stream, correlation, graph;
  const char *name;
  uint64_t node;
};

static int (*tellLaunch)(uint32_t, int);
static int (*tellKernel)(const struct injectedKernel *);
static int (*tellAny)(const struct injectedKernel *);
static uint32_t correlations;
static __thread const char *nextName;

static void load(void) {
  const char *path = getenv("CUDA_INJECTION64_PATH");
  void *lib = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
  int (*begin)(void) = lib ? (int (*)(void))dlsym(lib, "InitializeInjection") : NULL;
  if (!begin || !begin()) return;
  tellKernel = (int (*)(const struct injectedKernel *))dlsym(lib, "injectedKernel");
  tellAny = (int (*)(const struct injectedKernel *))dlsym(lib, "injectedAnyKernel");
  tellLaunch = (int (*)(uint32_t, int))dlsym(lib, "injectedLaunch");
}

void injectOpen(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, load);
}

API void rigKernelName(const char *name) { nextName = name; }

const char *injectTakeName(void) {
  const char *name = nextName;
  nextName = NULL;
  return name;
}

uint32_t injectCorrelation(void) {
  return tellLaunch ? __atomic_add_fetch(&correlations, 1, __ATOMIC_RELAXED) : 0;
}

void injectLaunched(uint32_t correlation, bool graph) {
  if (correlation) tellLaunch(correlation, graph);
}

void injectRan(struct told *told, const struct op *op, uint64_t start, uint64_t end) {
  if (!tellLaunch || !op->name) return;
  if (told->count == TOLD_MOST) injectFlush(told);
  told->rows[told->count++] = (struct toldRow){start, end, op->name, told->correlation, told->node++,
                                               op->kind == OP_HOST};
}

/* Everything so far has ended: its time has been slept through. */
void injectFlush(struct told *told) {
  for (int i = 0; i < told->count; i++) {
    struct toldRow *row = &told->rows[i];
    struct injectedKernel k = {row->start, row->end, (uint32_t)currentDevice(), 7, row->correlation,
                               told->graph, row->name, told->graph ? row->node : 0};
    /* NCCL's work has no launch of its own outside graphs. */
    if (row->host && !told->graph) tellAny(&k);
    else tellKernel(&k);
  }
  told->count = 0;
}
