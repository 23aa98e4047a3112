/* A stand-in for libparcagpucupti.so: the same probes, made by the same tool, under the same rules.
 * Nothing is told while nobody listens to cuda_correlation, not all launches are if so wanted, and of
 * kernels only those whose launch was. CUPTI is played by whoever calls the functions below. */
#include "probes.h"

#include <stdlib.h>

#include "injection.h"

#define API __attribute__((visibility("default"), noinline))

enum { REMEMBERED = 1 << 16 };

static uint32_t toldOf[REMEMBERED]; /* by correlation modulo: correlation + 1 */
static long every = 1;              /* of the launches of each thread, one in so many is told of */
static __thread long seen;

API int InitializeInjection(void) {
  const char *text = getenv("TEST_INJECTION_EVERY");
  if (text && atol(text) > 0) every = atol(text);
  return 1;
}

API int injectedLaunch(uint32_t correlation, int graph) {
  if (!PARCAGPU_CUDA_CORRELATION_ENABLED()) return 0;
  if (seen++ % every) return 0;
  PARCAGPU_CUDA_CORRELATION(correlation, graph ? -514 : -307, graph ? "cuGraphLaunch" : "cuLaunchKernel");
  __atomic_store_n(&toldOf[correlation % REMEMBERED], correlation + 1, __ATOMIC_RELEASE);
  return 1;
}

API int injectedAnyKernel(const struct injectedKernel *k) {
  PARCAGPU_KERNEL_EXECUTED(k->start, k->end, k->correlation, k->device, k->stream, k->graph, k->node,
                           k->name);
  return 1;
}

API int injectedKernel(const struct injectedKernel *k) {
  uint32_t seen = __atomic_load_n(&toldOf[k->correlation % REMEMBERED], __ATOMIC_ACQUIRE);
  if (!PARCAGPU_CUDA_CORRELATION_ENABLED() || seen != k->correlation + 1) return 0;
  return injectedAnyKernel(k);
}

/* For a test of many: `count` kernels of one launch, a microsecond each. -> how many were told. */
API long injectedMany(uint64_t start, uint32_t correlation, uint32_t graph, long count, const char *name) {
  long told = 0;
  for (long i = 0; i < count; i++) {
    struct injectedKernel k = {.start = start + (uint64_t)i * 2000, .end = start + (uint64_t)i * 2000 + 1000,
                               .device = 1, .stream = 7, .correlation = correlation, .graph = graph,
                               .name = name, .node = (uint64_t)(i + 1)};
    told += injectedKernel(&k);
  }
  return told;
}
