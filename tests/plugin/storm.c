/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "storm.h"

#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

enum { WATCHERS = 2, BACKLOG = 64, MAX_CHANNELS = 6 };

/* One channel of one operation, as the watching thread gets it. */
struct channel {
  void *task;
  int number;
  uint64_t start, stop;
};

struct comm {
  const struct vtable *table;
  int version, ops;
  unsigned seed;
  int mask;
  void *context;
  pthread_mutex_t lock;
  struct channel queue[BACKLOG];
  int length;
  bool over;
};

static void step(unsigned *seed) {
  if (rand_r(seed) % 4 == 0) sched_yield();
}

static void post(struct comm *c, struct channel work) {
  for (bool done = false; !done;) {
    pthread_mutex_lock(&c->lock);
    done = c->length < BACKLOG;
    if (done) c->queue[c->length++] = work;
    pthread_mutex_unlock(&c->lock);
    if (!done) sched_yield();
  }
}

/* Takes any piece of work, not the oldest. */
static bool next(struct comm *c, unsigned *seed, struct channel *work) {
  pthread_mutex_lock(&c->lock);
  bool found = c->length > 0;
  if (found) {
    int at = rand_r(seed) % c->length;
    *work = c->queue[at];
    c->queue[at] = c->queue[--c->length];
  }
  bool go_on = found || !c->over;
  pthread_mutex_unlock(&c->lock);
  if (!found) work->task = NULL;
  return go_on;
}

static void *watch(void *argument) {
  struct comm *c = argument;
  unsigned seed = c->seed + 1 + (unsigned)(uintptr_t)pthread_self();
  struct channel work;
  while (next(c, &seed, &work)) {
    void *handle = NULL;
    if (!work.task) {
      sched_yield();
      continue;
    }
    struct blob b = kernel(c->version, 0, work.task, work.number, work.start);
    c->table->start(c->context, &handle, &b);
    step(&seed);
    if (!handle) continue;
    c->table->state(handle, 22, &(uint64_t[4]){work.stop});
    step(&seed);
    c->table->stop(handle);
  }
  return NULL;
}

static void *start(struct comm *c, struct blob b) {
  void *handle = NULL;
  c->table->start(c->context, &handle, &b);
  return handle;
}

/* Channel k of operation n: from 1000 n + k to 1000 n + 500 + 3 k, after an epoch. */
static void post_channels(struct comm *c, void *task, int n, int first, int channels) {
  uint64_t base = 1000000000u + 1000u * (uint64_t)n;
  for (int k = first; k < first + channels; k++) {
    post(c, (struct channel){task, k, base + (uint64_t)k, base + 500 + 3 * (uint64_t)k});
  }
}

static void one(struct comm *c, int n, unsigned *seed) {
  int channels = 1 + n % MAX_CHANNELS;
  void *api = start(c, call(c->version, 256, NULL, 0));
  void *plan, *tasks[3];
  int count = n % 3 == 2 ? 3 : 1;
  if (count == 1) {
    void *made = start(c, call(c->version, 512, api, 0));
    plan = start(c, blank(c->version, 1, NULL, 0));
    tasks[0] = start(c, coll(c->version, 0, made, plan, (uint64_t)n, "AllReduce", 100,
                             "ncclFloat32", 0, channels));
    post_channels(c, tasks[0], n, 0, channels);
  } else {
    void *calls[3];
    for (int i = 0; i < 3; i++) calls[i] = start(c, call(c->version, 1024, api, 0));
    plan = start(c, blank(c->version, 1, NULL, 0));
    for (int i = 0; i < 3; i++) {
      tasks[i] = start(c, p2p(c->version, 0, calls[i], plan, i == 1 ? "Recv" : "Send", 10,
                              "ncclInt8", i + 1, 2));
    }
    for (int i = 0; i < 3; i++) post_channels(c, tasks[i], n, 2 * i, 2);
  }
  step(seed);
  for (int i = 0; i < count; i++) c->table->stop(tasks[i]);
  step(seed);
  c->table->stop(plan);
  c->table->stop(api);
}

static void *run(void *argument) {
  struct comm *c = argument;
  unsigned seed = c->seed;
  pthread_t threads[WATCHERS];
  call_init(c->table, c->version, &c->context, 0xC0 + c->seed, &c->mask, NULL, 1, 8, 0);
  for (int i = 0; i < WATCHERS; i++) pthread_create(&threads[i], NULL, watch, c);
  for (int n = 0; n < c->ops; n++) one(c, n, &seed);
  pthread_mutex_lock(&c->lock);
  c->over = true;
  pthread_mutex_unlock(&c->lock);
  for (int i = 0; i < WATCHERS; i++) pthread_join(threads[i], NULL);
  c->table->finalize(c->context);
  return NULL;
}

void storm(const struct vtable *table, int version, int comms, int ops, unsigned seed) {
  struct comm *all = calloc((size_t)comms, sizeof(*all));
  pthread_t *threads = calloc((size_t)comms, sizeof(*threads));
  for (int i = 0; i < comms; i++) {
    all[i] = (struct comm){.table = table, .version = version, .ops = ops,
                           .seed = seed + (unsigned)i};
    pthread_mutex_init(&all[i].lock, NULL);
    pthread_create(&threads[i], NULL, run, &all[i]);
  }
  for (int i = 0; i < comms; i++) pthread_join(threads[i], NULL);
  free(threads);
  free(all);
}
