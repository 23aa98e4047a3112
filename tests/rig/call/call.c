/* rigcall: NCCL calls of a single process, whose number is known exactly.
 *
 *   rigcall --known [--ranks N] [--repeat N]   every kind of call once a round, counts as JSON
 *   rigcall --rate R --seconds S --threads T   ncclAllReduce on communicators of one rank
 *           --count N                          ... exactly N calls a thread
 *           --start-file PATH                  wait for the file first (after init)
 *           --out-of-place                     enqueue real work instead of nothing
 *
 * With --rate 0 calls follow each other as fast as they can. */
#include <getopt.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "call.h"

struct callOptions options = {.ranks = 1, .repeat = 1, .threads = 1, .seconds = 1};

uint64_t nowNs(void) {
  struct timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

void must(int result, const char *what) {
  if (!result) return;
  fprintf(stderr, "rigcall: %s gave %d\n", what, result);
  exit(2);
}

static void waitForStart(void) {
  while (options.startFile && access(options.startFile, F_OK)) {
    nanosleep(&(struct timespec){0, 2000000}, NULL);
  }
}

struct lane {
  pthread_t thread;
  uint64_t calls, ns;
};

static void sleepUntil(uint64_t ns) {
  struct timespec ts = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
  clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &ts, NULL);
}

/* Sleeping before every call would cap the rate: calls go in small lots, then one sleep. */
static void *callAtRate(void *arg) {
  struct lane *lane = arg;
  ncclComm_t comm;
  ncclUniqueId id;
  float in[64] = {1}, out[64];
  must(ncclGetUniqueId(&id), "ncclGetUniqueId");
  must(ncclCommInitRank(&comm, 1, id, 0), "ncclCommInitRank");
  waitForStart();
  uint64_t begin = nowNs(), end = begin + (uint64_t)(options.seconds * 1e9);
  uint64_t lot = options.rate > 0 ? (uint64_t)(options.rate / 1000) + 1 : 1024;
  float *result = options.outOfPlace ? out : in;
  while (options.count ? lane->calls < options.count : nowNs() < end) {
    for (uint64_t i = 0; i < lot && (!options.count || lane->calls < options.count); i++) {
      ncclAllReduce(in, result, 64, ncclFloat32, ncclSum, comm, NULL);
      lane->calls++;
    }
    if (options.rate > 0) {
      sleepUntil(begin + (uint64_t)((double)lane->calls / options.rate * 1e9));
    }
  }
  lane->ns = nowNs() - begin;
  must(ncclCommDestroy(comm), "ncclCommDestroy");
  return NULL;
}

static void runRate(void) {
  struct lane *lanes = calloc((size_t)options.threads, sizeof(*lanes));
  uint64_t calls = 0, longest = 1;
  if (!lanes) exit(2);
  for (int i = 0; i < options.threads; i++) {
    must(pthread_create(&lanes[i].thread, NULL, callAtRate, &lanes[i]), "pthread_create");
  }
  for (int i = 0; i < options.threads; i++) {
    pthread_join(lanes[i].thread, NULL);
    calls += lanes[i].calls;
    if (lanes[i].ns > longest) longest = lanes[i].ns;
  }
  printf("{\"calls\": %llu, \"threads\": %d, \"seconds\": %.6f, \"ns_per_call\": %.2f}\n",
         (unsigned long long)calls, options.threads, (double)longest / 1e9,
         (double)longest * options.threads / (double)(calls ? calls : 1));
  free(lanes);
}

enum { O_KNOWN = 256, O_RANKS, O_REPEAT, O_RATE, O_SECONDS, O_THREADS, O_COUNT, O_START, O_OUT };

static const struct option table[] = {
    {"known", 0, 0, O_KNOWN},     {"ranks", 1, 0, O_RANKS},       {"repeat", 1, 0, O_REPEAT},
    {"rate", 1, 0, O_RATE},       {"seconds", 1, 0, O_SECONDS},   {"threads", 1, 0, O_THREADS},
    {"count", 1, 0, O_COUNT},     {"start-file", 1, 0, O_START},  {"out-of-place", 0, 0, O_OUT},
    {0, 0, 0, 0},
};

int main(int argc, char **argv) {
  for (int option; (option = getopt_long(argc, argv, "", table, NULL)) != -1;) {
    switch (option) {
      case O_KNOWN: options.known = true; break;
      case O_RANKS: options.ranks = atoi(optarg); break;
      case O_REPEAT: options.repeat = atoi(optarg); break;
      case O_RATE: options.rate = atof(optarg); break;
      case O_SECONDS: options.seconds = atof(optarg); break;
      case O_THREADS: options.threads = atoi(optarg); break;
      case O_COUNT: options.count = strtoull(optarg, NULL, 10); break;
      case O_START: options.startFile = optarg; break;
      case O_OUT: options.outOfPlace = true; break;
      default: return 2;
    }
  }
  if (options.ranks < 1 || options.ranks > MAX_RANKS || options.threads < 1) return 2;
  if (options.known) {
    waitForStart();
    runKnown();
  } else {
    runRate();
  }
  return 0;
}
