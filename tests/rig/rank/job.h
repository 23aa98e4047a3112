/* What the files of the rank process share. */
#ifndef RIG_JOB_H
#define RIG_JOB_H

#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>

#define RIG_NCCL_WEAK_NEW
#include "nccl.h"
#include "rigcuda.h"
#include "routing.h"

enum mode { MODE_EAGER, MODE_RUN_AHEAD, MODE_GRAPH };
enum phase { PHASE_NONE, PHASE_DISPATCH, PHASE_COMBINE, PHASE_ALLREDUCE, PHASE_DP, PHASE_PP, PHASES };

struct options {
  int rank, ranks, ranksPerNode, hidden, layers, dpGroups, reduceCount;
  struct routing routing;
  uint64_t steps; /* 0: until the time is over or SIGTERM */
  double seconds, truthEvery, graceSeconds;
  double attnUs, expertUs, expertNsPerToken;
  enum mode mode;
  bool equalSplit, pipeline, initFirst;
  const char *uidFile, *truth, *startFile, *name;
  char faults[1024]; /* comma-separated */
};

/* Every function the job calls, counted by the job itself. */
#define COUNTED(X)                                                                                \
  X(ncclGetUniqueId) X(ncclCommInitRank) X(ncclCommSplit) X(ncclCommDestroy)                      \
  X(ncclGroupStart) X(ncclGroupEnd) X(ncclSend) X(ncclRecv) X(ncclAlltoAll) X(ncclAllReduce)      \
  X(cuLaunchKernel) X(cuLaunchKernelEx) X(cuStreamSynchronize) X(cuGraphLaunch)

#define COUNTER_NAME(name) CALL_##name,
enum call { COUNTED(COUNTER_NAME) CALLS };

struct commTruth {
  const char *name;
  ncclComm_t comm;
  uint64_t hash, collectives, p2pGroups;
  int rank, ranks;
};

enum { RING = 4096, MAX_COMMS = 3 };

struct arrival {
  uint64_t step, hostNs, beginNs, endNs;
  uint32_t layer;
  enum phase phase;
};

struct waitSum {
  uint64_t count, sumNs, maxNs;
};

struct truth {
  pthread_mutex_t lock;
  const char *state;
  uint64_t step, beginNs, endNs, dataErrors;
  uint64_t calls[CALLS];
  uint64_t *sent[PHASES], *received[PHASES]; /* bytes by peer, dispatch and combine only */
  uint64_t attentionNs, expertNs, syncNs, tokensReceived;
  struct waitSum waits[PHASES];
  struct arrival ring[RING];
  uint64_t ringCount;
  struct commTruth comms[MAX_COMMS];
  int commCount;
  int error;
};

extern struct options options;
extern struct truth truth;
extern volatile sig_atomic_t stopAsked;

uint64_t nowNs(void);
void die(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));

void optionsParse(int argc, char **argv);

/* Host-side faults, as they stand at a step. */
double faultFactor(uint64_t step);
double faultHostMs(uint64_t step);
bool faultHot(uint64_t step);
bool faultAt(const char *kind, uint64_t step);
void faultsInit(void);

void truthInit(void);
void truthWrite(const char *state);
void truthStartThread(void);
void truthObserve(const rigNcclWork *work);
void truthHostTime(enum phase phase, int layer);
void truthCount(enum call call);
uint64_t truthTag(enum phase phase, int layer);

#define CALL(name, ...) (truthCount(CALL_##name), name(__VA_ARGS__))

void runSteps(ncclComm_t world, ncclComm_t dp, ncclComm_t pair);

#endif
