/* What the two halves of rigcall share. */
#ifndef RIG_CALL_H
#define RIG_CALL_H

#include <stdbool.h>
#include <stdint.h>

#define RIG_NCCL_WEAK_NEW
#include "nccl.h"
#include "rigcuda.h"

enum { MAX_RANKS = 16 };

struct callOptions {
  bool known, outOfPlace;
  int ranks, repeat, threads;
  double rate, seconds;
  uint64_t count;
  const char *startFile;
};

extern struct callOptions options;

uint64_t nowNs(void);
void must(int result, const char *what);
void runKnown(void);

#endif
