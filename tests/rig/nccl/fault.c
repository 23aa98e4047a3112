/* Faults that act inside the transport, from RIG_FAULT: a comma-separated list of
 * slow-sender:RANK:MS, slow-receiver:RANK:MS and slow-path:SRC:DST:MS, each with an optional
 * @STEP from which it holds. Other faults in the list are the job's business. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "segment.h"

enum kind { SENDER, RECEIVER, PATH };
enum { MAX_FAULTS = 32 };

static struct fault {
  enum kind kind;
  int rank, other;
  uint64_t ns, fromStep;
} faults[MAX_FAULTS];
static int count;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void parseOne(const char *text) {
  struct fault f = {0};
  double ms = 0;
  const char *at = strchr(text, '@');
  f.fromStep = at ? strtoull(at + 1, NULL, 10) : 0;
  if (sscanf(text, "slow-sender:%d:%lf", &f.rank, &ms) == 2) {
    f.kind = SENDER;
  } else if (sscanf(text, "slow-receiver:%d:%lf", &f.rank, &ms) == 2) {
    f.kind = RECEIVER;
  } else if (sscanf(text, "slow-path:%d:%d:%lf", &f.rank, &f.other, &ms) == 3) {
    f.kind = PATH;
  } else {
    return;
  }
  f.ns = (uint64_t)(ms * 1e6);
  if (count < MAX_FAULTS) faults[count++] = f;
}

static void parse(void) {
  const char *text = getenv("RIG_FAULT");
  char *copy = text ? strdup(text) : NULL, *save = NULL;
  for (char *one = copy ? strtok_r(copy, ",", &save) : NULL; one; one = strtok_r(NULL, ",", &save)) {
    parseOne(one);
  }
  free(copy);
}

static uint64_t delay(enum kind kind, int rank, int other, uint64_t step) {
  uint64_t ns = 0;
  pthread_once(&once, parse);
  for (int i = 0; i < count; i++) {
    const struct fault *f = &faults[i];
    if (f->kind != kind || f->rank != rank || step < f->fromStep) continue;
    if (kind != PATH || f->other == other) ns += f->ns;
  }
  return ns;
}

uint64_t faultSender(int rank, uint64_t step) { return delay(SENDER, rank, 0, step); }
uint64_t faultReceiver(int rank, uint64_t step) { return delay(RECEIVER, rank, 0, step); }
uint64_t faultPath(int from, int to, uint64_t step) { return delay(PATH, from, to, step); }
