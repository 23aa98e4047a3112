/* The imaginary host that all rig libraries agree on: GPU n has the same bus id and UUID in CUDA,
 * NCCL and NVML, so that a test can join the three as on a real machine. */
#ifndef RIG_TOPO_H
#define RIG_TOPO_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { RIG_MAX_GPUS = 64 };

static inline int rigEnvInt(const char *name, int fallback) {
  const char *text = getenv(name);
  return (text && *text) ? atoi(text) : fallback;
}

/* RIG_NODE numbers the simulated node; NCCL groups ranks by it, UUIDs differ by it. */
static inline int rigNode(void) { return rigEnvInt("RIG_NODE", 0); }

static inline int rigGpuCount(void) {
  int count = rigEnvInt("RIG_GPU_COUNT", 8);
  return count < 0 ? 0 : count > RIG_MAX_GPUS ? RIG_MAX_GPUS : count;
}

static inline unsigned rigGpuBus(int gpu) { return 0x0a + 3u * (unsigned)gpu; }

/* NCCL's int64 form: the hexadecimal digits of "0000:0a:00.0" read as one number. */
static inline int64_t rigGpuBusId64(int gpu) { return (int64_t)rigGpuBus(gpu) << 12; }

static inline void rigGpuUuid(int gpu, char *out, size_t size) {
  snprintf(out, size, "GPU-%08x-0000-4000-8000-%012x", 0x11a70000u + (unsigned)rigNode(),
           (unsigned)gpu + 1u);
}

#endif
