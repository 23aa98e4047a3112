/* Faults of the host and of compute. Those of the transport act inside libnccl, which reads the
 * same list from RIG_FAULT. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "job.h"

enum { MAX_FAULTS = 32 };

static struct fault {
  char kind[24];
  double args[3];
  uint64_t fromStep;
} faults[MAX_FAULTS];
static int count;

static void parseOne(char *text) {
  struct fault f = {0};
  char *at = strchr(text, '@');
  if (at) {
    f.fromStep = strtoull(at + 1, NULL, 10);
    *at = 0;
  }
  int got = sscanf(text, "%23[a-z-]:%lf:%lf:%lf", f.kind, &f.args[0], &f.args[1], &f.args[2]);
  static const struct {
    const char *kind;
    int args;
  } known[] = {{"slow-rank", 2},    {"slow-sender", 2}, {"slow-receiver", 2},
               {"slow-path", 3},    {"hot-expert", 2},  {"slow-host", 2},
               {"intermittent", 3}, {"hang", 2},        {"crash", 2}};
  for (size_t i = 0; i < sizeof(known) / sizeof(*known); i++) {
    if (strcmp(known[i].kind, f.kind) || got != 1 + known[i].args) continue;
    if (count < MAX_FAULTS) faults[count++] = f;
    return;
  }
  die("bad fault: %s", text);
}

void faultsInit(void) {
  char *copy = strdup(options.faults), *save = NULL;
  if (!copy) die("out of memory");
  setenv("RIG_FAULT", options.faults, 1);
  for (char *one = strtok_r(copy, ",", &save); one; one = strtok_r(NULL, ",", &save)) parseOne(one);
  free(copy);
  for (int i = 0; i < count; i++) {
    if (strcmp(faults[i].kind, "hot-expert")) continue;
    options.routing.hotExpert = (int)faults[i].args[0];
    options.routing.hotFactor = faults[i].args[1];
  }
}

static const struct fault *find(const char *kind, bool anyRank) {
  for (int i = 0; i < count; i++) {
    if (strcmp(faults[i].kind, kind)) continue;
    if (anyRank || (int)faults[i].args[0] == options.rank) return &faults[i];
  }
  return NULL;
}

double faultFactor(uint64_t step) {
  double factor = 1;
  const struct fault *slow = find("slow-rank", false), *some = find("intermittent", false);
  if (slow && step >= slow->fromStep) factor *= slow->args[1];
  if (some && step >= some->fromStep) {
    uint64_t period = some->args[2] < 1 ? 1 : (uint64_t)some->args[2];
    if ((step - some->fromStep) / period % 2 == 1) factor *= some->args[1];
  }
  return factor;
}

double faultHostMs(uint64_t step) {
  const struct fault *f = find("slow-host", false);
  return f && step >= f->fromStep ? f->args[1] : 0;
}

bool faultHot(uint64_t step) {
  const struct fault *f = find("hot-expert", true);
  return f && step >= f->fromStep;
}

bool faultAt(const char *kind, uint64_t step) {
  const struct fault *f = find(kind, false);
  return f && (uint64_t)f->args[1] == step;
}
