/* The ground truth: what this rank really did, in its own count, as one JSON file. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "job.h"
#include "rigtopo.h"

enum { MAX_LAYERS = 1024 };

struct truth truth = {.lock = PTHREAD_MUTEX_INITIALIZER, .state = "starting"};
static uint64_t hostTimes[PHASES][MAX_LAYERS];

static const char *const phaseNames[PHASES] = {"none",      "dispatch", "combine",
                                               "allreduce", "dp",       "pipeline"};

uint64_t nowNs(void) {
  struct timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

void truthInit(void) {
  for (int phase = PHASE_DISPATCH; phase <= PHASE_COMBINE; phase++) {
    truth.sent[phase] = calloc((size_t)options.ranks, sizeof(uint64_t));
    truth.received[phase] = calloc((size_t)options.ranks, sizeof(uint64_t));
    if (!truth.sent[phase] || !truth.received[phase]) die("out of memory");
  }
  truth.beginNs = nowNs();
  rigNcclObserve(truthObserve);
}

void truthCount(enum call call) { __atomic_fetch_add(&truth.calls[call], 1, __ATOMIC_RELAXED); }

uint64_t truthTag(enum phase phase, int layer) { return (uint64_t)phase << 32 | (unsigned)layer; }

void truthHostTime(enum phase phase, int layer) {
  if (layer < MAX_LAYERS) __atomic_store_n(&hostTimes[phase][layer], nowNs(), __ATOMIC_RELAXED);
}

/* Called on the stream's thread: begin is when this rank's device came to the operation. */
void truthObserve(const rigNcclWork *work) {
  enum phase phase = (enum phase)(work->tag >> 32);
  uint32_t layer = (uint32_t)work->tag;
  if (phase == PHASE_NONE || phase >= PHASES) return;
  uint64_t span = work->endNs - work->beginNs;
  uint64_t host = layer < MAX_LAYERS ? hostTimes[phase][layer] : 0;
  pthread_mutex_lock(&truth.lock);
  struct waitSum *sum = &truth.waits[phase];
  sum->count++;
  sum->sumNs += span;
  if (span > sum->maxNs) sum->maxNs = span;
  truth.ring[truth.ringCount++ % RING] = (struct arrival){
      .step = work->step, .hostNs = host, .beginNs = work->beginNs, .endNs = work->endNs,
      .layer = layer, .phase = phase};
  if (work->result && !truth.error) truth.error = work->result;
  pthread_mutex_unlock(&truth.lock);
}

static void writeNumbers(FILE *out, const char *key, const uint64_t *values, int count) {
  fprintf(out, "  \"%s\": [", key);
  for (int i = 0; i < count; i++) {
    fprintf(out, "%s%llu", i ? "," : "", (unsigned long long)values[i]);
  }
  fputs("],\n", out);
}

static void writeCalls(FILE *out) {
#define CALL_TEXT(name) #name,
  static const char *const names[CALLS] = {COUNTED(CALL_TEXT)};
  fputs("  \"calls\": {", out);
  for (int i = 0; i < CALLS; i++) {
    fprintf(out, "%s\"%s\": %llu", i ? ", " : "", names[i], (unsigned long long)truth.calls[i]);
  }
  fputs("},\n", out);
}

static void writeComms(FILE *out) {
  fputs("  \"comms\": [", out);
  for (int i = 0; i < truth.commCount; i++) {
    const struct commTruth *c = &truth.comms[i];
    fprintf(out,
            "%s\n    {\"name\": \"%s\", \"hash\": \"0x%016llx\", \"pointer\": \"0x%llx\", "
            "\"rank\": %d, \"nranks\": %d, \"collectives\": %llu, \"p2p_groups\": %llu}",
            i ? "," : "", c->name, (unsigned long long)c->hash,
            (unsigned long long)(uintptr_t)c->comm, c->rank, c->ranks,
            (unsigned long long)c->collectives, (unsigned long long)c->p2pGroups);
  }
  fputs("],\n", out);
}

static void writeWaits(FILE *out) {
  fputs("  \"waits\": {", out);
  for (int i = PHASE_DISPATCH; i < PHASES; i++) {
    const struct waitSum *w = &truth.waits[i];
    fprintf(out, "%s\"%s\": {\"count\": %llu, \"sum_ns\": %llu, \"max_ns\": %llu}",
            i > PHASE_DISPATCH ? ", " : "", phaseNames[i], (unsigned long long)w->count,
            (unsigned long long)w->sumNs, (unsigned long long)w->maxNs);
  }
  fputs("},\n", out);
}

static void writeRing(FILE *out) {
  uint64_t first = truth.ringCount > RING ? truth.ringCount - RING : 0;
  fputs("  \"arrival_columns\": [\"step\", \"layer\", \"phase\", \"host_ns\", \"begin_ns\", "
        "\"end_ns\"],\n  \"arrivals\": [", out);
  for (uint64_t i = first; i < truth.ringCount; i++) {
    const struct arrival *a = &truth.ring[i % RING];
    fprintf(out, "%s\n    [%llu, %u, \"%s\", %llu, %llu, %llu]", i > first ? "," : "",
            (unsigned long long)a->step, a->layer, phaseNames[a->phase],
            (unsigned long long)a->hostNs, (unsigned long long)a->beginNs,
            (unsigned long long)a->endNs);
  }
  fputs("]\n}\n", out);
}

static void writeHead(FILE *out) {
  static const char *const modes[] = {"eager", "run-ahead", "graph"};
  int device = options.rank % options.ranksPerNode;
  fprintf(out,
          "{\n  \"name\": \"%s\", \"rank\": %d, \"ranks\": %d, \"pid\": %d, \"node\": %d, "
          "\"device\": %d, \"bus_id\": \"0000:%02x:00.0\",\n  \"mode\": \"%s\", \"state\": \"%s\", "
          "\"error\": %d, \"steps\": %llu, \"layers\": %d, \"data_errors\": %llu,\n"
          "  \"begin_ns\": %llu, \"end_ns\": %llu,\n",
          options.name, options.rank, options.ranks, (int)getpid(),
          options.rank / options.ranksPerNode, device, rigGpuBus(device), modes[options.mode],
          truth.state, truth.error, (unsigned long long)truth.step, options.layers,
          (unsigned long long)truth.dataErrors, (unsigned long long)truth.beginNs,
          (unsigned long long)nowNs());
  fprintf(out,
          "  \"phases\": {\"attention_ns\": %llu, \"expert_ns\": %llu, \"sync_ns\": %llu, "
          "\"tokens_received\": %llu},\n",
          (unsigned long long)truth.attentionNs, (unsigned long long)truth.expertNs,
          (unsigned long long)truth.syncNs, (unsigned long long)truth.tokensReceived);
}

void truthWrite(const char *state) {
  char temporary[4096];
  if (!options.truth) return;
  snprintf(temporary, sizeof(temporary), "%s.%d.tmp", options.truth, (int)getpid());
  pthread_mutex_lock(&truth.lock);
  if (state) truth.state = state;
  FILE *out = fopen(temporary, "w");
  if (out) {
    writeHead(out);
    writeCalls(out);
    writeComms(out);
    writeNumbers(out, "dispatch_bytes_sent", truth.sent[PHASE_DISPATCH], options.ranks);
    writeNumbers(out, "dispatch_bytes_received", truth.received[PHASE_DISPATCH], options.ranks);
    writeNumbers(out, "combine_bytes_sent", truth.sent[PHASE_COMBINE], options.ranks);
    writeNumbers(out, "combine_bytes_received", truth.received[PHASE_COMBINE], options.ranks);
    writeWaits(out);
    writeRing(out);
    if (fclose(out) == 0) rename(temporary, options.truth);
  }
  pthread_mutex_unlock(&truth.lock);
}

/* Writes the truth now and then, and ends a rank that cannot reach a step boundary. */
static void *watch(void *arg) {
  uint64_t lastWrite = nowNs(), asked = 0;
  (void)arg;
  for (;;) {
    nanosleep(&(struct timespec){0, 50000000}, NULL);
    uint64_t now = nowNs();
    if (options.truthEvery > 0 && (double)(now - lastWrite) > options.truthEvery * 1e9) {
      truthWrite(NULL);
      lastWrite = now;
    }
    if (stopAsked && !asked) asked = now;
    if (asked && (double)(now - asked) > options.graceSeconds * 1e9) {
      truthWrite("stuck");
      _exit(4);
    }
  }
  return NULL;
}

void truthStartThread(void) {
  pthread_t thread;
  sigset_t all, old;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  if (!pthread_create(&thread, NULL, watch, NULL)) pthread_detach(thread);
  pthread_sigmask(SIG_SETMASK, &old, NULL);
}
