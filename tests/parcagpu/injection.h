/* What the stand-in for parcagpu's library is told by whoever plays CUPTI to it. */
#ifndef TEST_INJECTION_H
#define TEST_INJECTION_H

#include <stdint.h>

/* The fields of a kernel's activity record that are passed on, in CUPTI's order, not the probe's. */
struct injectedKernel {
  uint64_t start, end;
  uint32_t device, stream, correlation, graph;
  const char *name;
  uint64_t node;
};

int InitializeInjection(void);

/* End of a launch; -> 1 if it is told of, and its kernels will be. */
int injectedLaunch(uint32_t correlation, int graph);

/* A kernel has been timed; -> 1 if it is told of. */
int injectedKernel(const struct injectedKernel *kernel);

/* A kernel that nobody launched through `injectedLaunch`. */
int injectedAnyKernel(const struct injectedKernel *kernel);

#endif
