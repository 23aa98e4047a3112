/* The steps of the job: attention, dispatch, experts, combine, layer by layer. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "job.h"

enum { ELEMENT = 2 };     /* bfloat16 */
enum { EXIT_REMOTE = 6 }; /* another rank is gone */

struct plan {
  int64_t *counts;           /* by source rank and expert */
  int64_t *toPeer, *fromPeer; /* rows (token copies) */
  int64_t received;
};

struct bench {
  ncclComm_t world, dp, pair;
  CUstream stream;
  CUfunction attention[4], expert[2];
  char *send, *expertIn, *back; /* dispatch: send to expertIn; combine: expertIn to back */
  float *reduceIn, *reduceOut, *dpBuffer, *pairBuffer;
  size_t rowBytes, capacityRows;
  struct plan *plans; /* one a layer */
  double scale;
  CUgraphExec graph;
};

static void check(int result, const char *what) {
  if (!result) return;
  truth.error = result;
  truthWrite("error");
  fprintf(stderr, "rigjob rank %d: %s failed with %d\n", options.rank, what, result);
  _exit(result == ncclRemoteError ? EXIT_REMOTE : 2);
}

static void sleepMs(double ms) {
  if (ms <= 0) return;
  struct timespec ts = {(time_t)(ms / 1e3), (long)((uint64_t)(ms * 1e6) % 1000000000u)};
  nanosleep(&ts, NULL);
}

static int64_t equalRows(void) {
  int64_t all = (int64_t)options.routing.tokens * options.routing.topk;
  return (all + options.ranks - 1) / options.ranks;
}

/* Who sends how much to whom in this layer; also how much work the own experts get. */
static void makePlan(struct plan *p, uint64_t step, int layer) {
  int n = options.ranks, perRank = options.routing.experts / n;
  routingCounts(&options.routing, step, (uint64_t)layer, faultHot(step), p->counts);
  p->received = 0;
  for (int peer = 0; peer < n; peer++) {
    p->toPeer[peer] = p->fromPeer[peer] = 0;
    for (int e = 0; e < perRank; e++) {
      const int64_t *mine = p->counts + (size_t)options.rank * (size_t)options.routing.experts;
      const int64_t *theirs = p->counts + (size_t)peer * (size_t)options.routing.experts;
      p->toPeer[peer] += mine[peer * perRank + e];
      p->fromPeer[peer] += theirs[options.rank * perRank + e];
    }
    if (options.equalSplit) p->toPeer[peer] = p->fromPeer[peer] = equalRows();
    p->received += p->fromPeer[peer];
  }
}

static void launchEx(struct bench *b, CUfunction f, double us) {
  uint64_t ns = (uint64_t)(us * 1e3);
  const double *scale = &b->scale;
  void *params[] = {&ns, &scale};
  CUlaunchConfig config = {1, 1, 1, 128, 1, 1, 0, b->stream, NULL, 0};
  check(CALL(cuLaunchKernelEx, &config, f, params, NULL), "cuLaunchKernelEx");
}

static void launch(struct bench *b, CUfunction f, double us) {
  uint64_t ns = (uint64_t)(us * 1e3);
  const double *scale = &b->scale;
  void *params[] = {&ns, &scale};
  check(CALL(cuLaunchKernel, f, 1, 1, 1, 128, 1, 1, 0, b->stream, params, NULL), "cuLaunchKernel");
}

static void attention(struct bench *b) {
  static const double parts[4] = {0.2, 0.55, 0.15, 0.1}; /* qkv, attention, out-proj, router */
  for (int i = 0; i < 4; i++) launchEx(b, b->attention[i], options.attnUs * parts[i]);
}

static double expertUs(const struct plan *p) {
  return options.expertUs + (double)p->received * options.expertNsPerToken / 1e3;
}

static void experts(struct bench *b, const struct plan *p) {
  launch(b, b->expert[0], expertUs(p) * 0.6);
  launch(b, b->expert[1], expertUs(p) * 0.4);
}

/* Time and bytes of what the device does, counted once for every time it does it. */
static void account(struct bench *b, const struct plan *p) {
  pthread_mutex_lock(&truth.lock);
  truth.attentionNs += (uint64_t)(options.attnUs * b->scale * 1e3);
  truth.expertNs += (uint64_t)(expertUs(p) * b->scale * 1e3);
  truth.tokensReceived += (uint64_t)p->received;
  for (int peer = 0; peer < options.ranks; peer++) {
    uint64_t out = (uint64_t)p->toPeer[peer] * b->rowBytes;
    uint64_t in = (uint64_t)p->fromPeer[peer] * b->rowBytes;
    truth.sent[PHASE_DISPATCH][peer] += out;
    truth.received[PHASE_DISPATCH][peer] += in;
    truth.sent[PHASE_COMBINE][peer] += in;
    truth.received[PHASE_COMBINE][peer] += out;
  }
  pthread_mutex_unlock(&truth.lock);
}

/* Pairs without tokens are left out on both sides, as frameworks do. */
static void exchange(struct bench *b, enum phase phase, int layer, char *from,
                     const int64_t *outRows, char *to, const int64_t *inRows) {
  size_t rowCount = (size_t)options.hidden, outAt = 0, inAt = 0;
  rigNcclTag(truthTag(phase, layer));
  truthHostTime(phase, layer);
  truth.comms[0].p2pGroups++;
  if (options.equalSplit) {
    size_t count = (size_t)outRows[0] * rowCount;
    check(CALL(ncclAlltoAll, from, to, count, ncclBfloat16, b->world, b->stream), "ncclAlltoAll");
    return;
  }
  check(CALL(ncclGroupStart), "ncclGroupStart");
  for (int peer = 0; peer < options.ranks; peer++) {
    size_t out = (size_t)outRows[peer] * rowCount, in = (size_t)inRows[peer] * rowCount;
    if (out) {
      check(CALL(ncclSend, from + outAt, out, ncclBfloat16, peer, b->world, b->stream), "ncclSend");
    }
    if (in) {
      check(CALL(ncclRecv, to + inAt, in, ncclBfloat16, peer, b->world, b->stream), "ncclRecv");
    }
    outAt += out * ELEMENT;
    inAt += in * ELEMENT;
  }
  check(CALL(ncclGroupEnd), "ncclGroupEnd");
}

static void synchronize(struct bench *b) {
  uint64_t begin = nowNs();
  check(CALL(cuStreamSynchronize, b->stream), "cuStreamSynchronize");
  truth.syncNs += nowNs() - begin;
}

static void allReduce(struct bench *b, ncclComm_t comm, int index, enum phase phase,
                      const float *in, float *out) {
  rigNcclTag(truthTag(phase, 0));
  truthHostTime(phase, 0);
  truth.comms[index].collectives++;
  check(CALL(ncclAllReduce, in, out, (size_t)options.reduceCount, ncclFloat32, ncclSum, comm,
             b->stream), "ncclAllReduce");
}

static int commIndex(ncclComm_t comm) {
  for (int i = 0; i < truth.commCount; i++) {
    if (truth.comms[i].comm == comm) return i;
  }
  return 0;
}

static void pipeline(struct bench *b) {
  int rank = options.rank & 1;
  size_t count = (size_t)options.hidden;
  rigNcclTag(truthTag(PHASE_PP, 0));
  truthHostTime(PHASE_PP, 0);
  truth.comms[commIndex(b->pair)].p2pGroups++;
  if (rank == 0) {
    check(CALL(ncclSend, b->pairBuffer, count, ncclFloat32, 1, b->pair, b->stream), "ncclSend");
  } else {
    check(CALL(ncclRecv, b->pairBuffer, count, ncclFloat32, 0, b->pair, b->stream), "ncclRecv");
  }
}

static void layer(struct bench *b, uint64_t step, int index) {
  struct plan *p = &b->plans[index];
  attention(b);
  makePlan(p, step, index); /* while the device computes */
  if (options.mode == MODE_EAGER) synchronize(b); /* the host needs the token counts */
  if (options.mode != MODE_GRAPH) sleepMs(faultHostMs(step));
  exchange(b, PHASE_DISPATCH, index, b->send, p->toPeer, b->expertIn, p->fromPeer);
  experts(b, p);
  exchange(b, PHASE_COMBINE, index, b->expertIn, p->fromPeer, b->back, p->toPeer);
}

static void enqueueStep(struct bench *b, uint64_t step) {
  if (b->pair) pipeline(b);
  for (int i = 0; i < options.layers; i++) layer(b, step, i);
  if (b->dp) allReduce(b, b->dp, commIndex(b->dp), PHASE_DP, b->dpBuffer, b->dpBuffer);
  allReduce(b, b->world, 0, PHASE_ALLREDUCE, b->reduceIn, b->reduceOut);
  rigNcclTag(0);
}

static void capture(struct bench *b) {
  CUgraph graph;
  check(cuStreamBeginCapture_v2(b->stream, 0), "cuStreamBeginCapture");
  enqueueStep(b, 0);
  check(cuStreamEndCapture(b->stream, &graph), "cuStreamEndCapture");
  check(cuGraphInstantiateWithFlags(&b->graph, graph, 0), "cuGraphInstantiate");
  check(cuGraphDestroy(graph), "cuGraphDestroy");
  /* Capturing enqueues nothing on the device: the operations count when they are replayed. */
  for (int i = 0; i < truth.commCount; i++) {
    truth.comms[i].collectives = truth.comms[i].p2pGroups = 0;
  }
}

static void replay(struct bench *b, uint64_t step) {
  sleepMs(faultHostMs(step));
  check(CALL(cuGraphLaunch, b->graph, b->stream), "cuGraphLaunch");
  truth.comms[0].collectives++;
  truth.comms[0].p2pGroups += 2u * (unsigned)options.layers;
  if (b->dp) truth.comms[commIndex(b->dp)].collectives++;
  if (b->pair) truth.comms[commIndex(b->pair)].p2pGroups++;
}

/* What came back from the experts must be what was sent to them. */
static void verify(struct bench *b) {
  const struct plan *p = &b->plans[options.layers - 1];
  int64_t rows = 0;
  for (int peer = 0; peer < options.ranks; peer++) rows += p->toPeer[peer];
  if (memcmp(b->send, b->back, (size_t)rows * b->rowBytes)) truth.dataErrors++;
  if (b->reduceOut[1] != (float)options.ranks) truth.dataErrors++;
  b->back[0] = (char)~b->send[0];
}

static void checkDevice(struct bench *b) {
  ncclResult_t error;
  ncclCommGetAsyncError(b->world, &error);
  if (!error) return;
  truth.error = (int)error;
  truthWrite("error");
  fprintf(stderr, "rigjob rank %d: communicator failed: %s\n", options.rank,
          ncclGetErrorString(error));
  _exit(EXIT_REMOTE);
}

static void beginStep(struct bench *b, uint64_t step) {
  if (faultAt("crash", step)) raise(SIGKILL);
  if (faultAt("hang", step)) {
    truthWrite("hung");
    for (;;) sleepMs(1000); /* the watch thread ends it after SIGTERM */
  }
  rigNcclSetStep(step);
  b->scale = faultFactor(step);
}

/* All ranks stop at the same step: whoever wants to says so in the all-reduce. */
static bool wantsStop(uint64_t step) {
  if (stopAsked) return true;
  if (options.steps && step + 1 >= options.steps) return true;
  return options.seconds > 0 && (double)(nowNs() - truth.beginNs) > options.seconds * 1e9;
}

static bool runStep(struct bench *b, uint64_t step) {
  beginStep(b, step);
  b->reduceIn[0] = wantsStop(step);
  if (options.mode == MODE_GRAPH) {
    replay(b, step);
  } else {
    enqueueStep(b, step);
  }
  synchronize(b);
  checkDevice(b);
  for (int i = 0; i < options.layers; i++) account(b, &b->plans[i]);
  verify(b);
  pthread_mutex_lock(&truth.lock);
  truth.step = step + 1;
  pthread_mutex_unlock(&truth.lock);
  return b->reduceOut[0] > 0;
}

static void *need(size_t bytes) {
  void *made = calloc(1, bytes);
  if (!made) die("out of memory");
  return made;
}

static void prepare(struct bench *b) {
  size_t n = (size_t)options.ranks;
  size_t reduceBytes = ((size_t)options.reduceCount + 2) * sizeof(float);
  b->rowBytes = (size_t)options.hidden * ELEMENT;
  size_t ownRows = (size_t)options.routing.tokens * (size_t)options.routing.topk + n;
  size_t allRows = (size_t)options.routing.tokens * n * (size_t)(options.routing.experts / (int)n);
  if (allRows < ownRows) allRows = ownRows;
  b->send = need(ownRows * b->rowBytes);
  b->back = need(ownRows * b->rowBytes);
  b->expertIn = need(allRows * b->rowBytes);
  b->reduceIn = need(reduceBytes);
  b->reduceOut = need(reduceBytes);
  b->dpBuffer = need(reduceBytes);
  b->pairBuffer = need((size_t)options.hidden * sizeof(float));
  for (int i = 1; i < options.reduceCount + 2; i++) b->reduceIn[i] = 1;
  for (size_t i = 0; i < ownRows * b->rowBytes; i++) {
    b->send[i] = (char)(i * 131 + (size_t)options.rank * 17 + 1);
  }
  b->plans = need((size_t)options.layers * sizeof(*b->plans));
  for (int i = 0; i < options.layers; i++) {
    b->plans[i].counts = need(n * (size_t)options.routing.experts * sizeof(int64_t));
    b->plans[i].toPeer = need(n * sizeof(int64_t));
    b->plans[i].fromPeer = need(n * sizeof(int64_t));
  }
  static const char *const names[4] = {"qkv_proj", "flash_attention", "out_proj", "topkGatingSoftmax"};
  for (int i = 0; i < 4; i++) b->attention[i] = rigKernelCreateScaled(names[i]);
  b->expert[0] = rigKernelCreateScaled("fused_moe_kernel_gate_up");
  b->expert[1] = rigKernelCreateScaled("fused_moe_kernel_down");
  b->scale = 1;
  check(cuStreamCreate(&b->stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
}

void runSteps(ncclComm_t world, ncclComm_t dp, ncclComm_t pair) {
  struct bench b = {.world = world, .dp = dp, .pair = pair};
  prepare(&b);
  if (options.reduceCount < 2) options.reduceCount = 2;
  if (options.mode == MODE_GRAPH) capture(&b);
  for (uint64_t step = 0; !runStep(&b, step); step++) {
  }
  synchronize(&b);
}
