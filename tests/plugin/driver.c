/* SPDX-License-Identifier: Apache-2.0 */
/* Plays NCCL to the plugin: one command a line on standard input, numbers for contexts and handles.
 *
 *   driver LIBRARY PROBE...         PROBE: see tracer.h
 *
 * On standard output: answers, and at the end every probe that was hit. A command whose call does
 * not return 0 ends the program. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "nccl.h"
#include "storm.h"
#include "tracer.h"

enum { CONTEXTS = 64, HANDLES = 65536 };

static void *library;
static const struct vtable *table;
static int version = 5;
static int mask;
static void *contexts[CONTEXTS];
static int ranks[CONTEXTS];
static void *handles[HANDLES]; /* 0 stays NULL */

static void must(int result, const char *line) {
  if (!result) return;
  fprintf(stderr, "returned %d: %s", result, line);
  exit(4);
}

static uint64_t host(void) {
  struct timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

/* "@delay": the GPU's clock, 5 s behind the host's, `delay` ns ago; else a plain number. */
static uint64_t timer_of(const char *text) {
  if (*text != '@') return strtoull(text, NULL, 0);
  return host() - 5000000000u - strtoull(text + 1, NULL, 0);
}

static void choose(int wanted) {
  char symbol[32];
  version = wanted;
  snprintf(symbol, sizeof(symbol), "ncclProfiler_v%d", version);
  table = dlsym(library, symbol);
  if (!table || strcmp(table->name, "lanterne")) exit(5);
}

/* NCCL's memory is not cleared: the plugin must write the handle. */
static void start(int c, int h, struct blob *what, const char *line) {
  void *handle = (void *)(uintptr_t)0xDEAD000;
  must(table->start(contexts[c], &handle, what), line);
  handles[h] = handle;
}

static void events(const char *word, const char *line) {
  int c, h, group, parent, root, channels, captured, type;
  unsigned long seq, count;
  char func[32], dtype[32], timer[32];
  struct blob b;
  if (!strcmp(word, "coll")) {
    sscanf(line, "%*s %d %d %d %d %31s %lu %lu %31s %d %d", &c, &h, &parent, &group, func, &seq,
           &count, dtype, &root, &channels);
    b = coll(version, ranks[c], handles[parent], handles[group], seq, func, count, dtype, root,
             channels);
  } else if (!strcmp(word, "p2p")) {
    sscanf(line, "%*s %d %d %d %d %31s %lu %31s %d %d", &c, &h, &parent, &group, func, &count,
           dtype, &root, &channels);
    b = p2p(version, ranks[c], handles[parent], handles[group], func, count, dtype, root, channels);
  } else if (!strcmp(word, "kernel")) {
    sscanf(line, "%*s %d %d %d %d %31s", &c, &h, &parent, &channels, timer);
    b = kernel(version, ranks[c], handles[parent], channels, timer_of(timer));
  } else if (!strcmp(word, "call")) {
    sscanf(line, "%*s %d %d %d %d %d", &c, &h, &type, &parent, &captured);
    b = call(version, type, handles[parent], captured);
  } else { /* any type, with a parent that must not be followed */
    sscanf(line, "%*s %d %d %d", &c, &h, &type);
    b = blank(version, (uint64_t)type, type == 1 ? NULL : (void *)(uintptr_t)0x1234567, ranks[c]);
  }
  start(c, h, &b, line);
}

static void init(const char *line) {
  int c, rank, n, nodes;
  unsigned long hash;
  sscanf(line, "%*s %d %lx %d %d %d", &c, &hash, &rank, &n, &nodes);
  ranks[c] = rank;
  contexts[c] = (void *)(uintptr_t)0xDEAD000;
  must(call_init(table, version, &contexts[c], hash, &mask, "world", nodes, n, ranks[c]), line);
  printf("context %d %d\n", c, contexts[c] != NULL);
}

static void nulls(const char *line) {
  struct blob b = coll(version, 0, NULL, NULL, 0, NULL, 1, NULL, 0, 1);
  void *handle = (void *)(uintptr_t)1;
  must(call_init(table, version, NULL, 1, &mask, NULL, 1, 1, 0), line);
  must(call_init(table, version, &handle, 1, NULL, NULL, 1, 1, 0), line);
  if (handle) exit(6);
  handle = (void *)(uintptr_t)1;
  must(table->start(NULL, &handle, &b), line);
  if (handle) exit(6);
  must(table->start(NULL, NULL, &b), line);
  must(table->start(contexts[1], NULL, &b), line);
  must(table->start(contexts[1], &handle, NULL), line);
  must(table->stop(NULL), line);
  must(table->state(NULL, 22, NULL), line);
  must(table->state(NULL, 22, &(uint64_t){5}), line);
  must(table->finalize(NULL), line);
  call_init(table, version, &handle, 2, &mask, NULL, 1, 1, 0);
  must(table->start(handle, &(void *){NULL}, &b), line);
  must(table->finalize(handle), line);
}

static void command(const char *word, const char *line) {
  int a = 0, b = 0, c = 0;
  char text[32];
  sscanf(line, "%*s %d %d %d", &a, &b, &c);
  if (!strcmp(word, "version")) {
    choose(a);
  } else if (!strcmp(word, "arm")) {
    sscanf(line, "%*s %31s %d", text, &b);
    tracer_arm(text, b);
  } else if (!strcmp(word, "init")) {
    init(line);
  } else if (!strcmp(word, "stop")) {
    must(table->stop(handles[a]), line);
  } else if (!strcmp(word, "state")) {
    sscanf(line, "%*s %d %d %31s", &a, &b, text);
    uint64_t timer[4] = {timer_of(text)};
    must(table->state(handles[a], b, timer), line);
    printf("bound %lu\n", (unsigned long)(host() - timer[0]));
  } else if (!strcmp(word, "finalize")) {
    must(table->finalize(contexts[a]), line);
  } else if (!strcmp(word, "nulls")) {
    nulls(line);
  } else if (!strcmp(word, "mask")) {
    printf("mask %d\n", mask);
  } else if (!strcmp(word, "setmask")) {
    mask = a;
  } else if (!strcmp(word, "handle")) {
    printf("handle %d %d\n", a, handles[a] != NULL);
  } else if (!strcmp(word, "sync")) {
    puts("sync");
    fflush(stdout);
  } else if (!strcmp(word, "sleep")) {
    nanosleep(&(struct timespec){a / 1000, a % 1000 * 1000000}, NULL);
  } else if (!strcmp(word, "storm")) {
    storm(table, version, a, b, (unsigned)c);
  } else {
    events(word, line);
  }
}

int main(int argc, char **argv) {
  static char line[512];
  char word[32];
  Dl_info where;
  library = argc > 1 ? dlopen(argv[1], RTLD_NOW | RTLD_LOCAL) : NULL;
  if (!library) {
    fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  choose(5);
  dladdr((void *)table, &where);
  for (int i = 2; i < argc; i++) tracer_add(argv[i]);
  tracer_start(where.dli_fbase);
  while (fgets(line, sizeof(line), stdin)) {
    if (sscanf(line, "%31s", word) == 1) command(word, line);
  }
  tracer_print();
  return 0;
}
