/* SPDX-License-Identifier: Apache-2.0 */
/* NCCL's side of the profiler interface, laid out byte by byte from the documented offsets and not
 * from the plugin's own headers. Everything beside the fields is filled with rubbish. */
#ifndef PLUGIN_TEST_NCCL_H
#define PLUGIN_TEST_NCCL_H

#include <stdint.h>
#include <string.h>

struct vtable {
  const char *name;
  int (*init)();
  int (*start)(void *, void **, void *);
  int (*stop)(void *);
  int (*state)(void *, int, void *);
  int (*finalize)(void *);
};

struct blob {
  unsigned char bytes[160];
};

static inline void put(struct blob *b, int at, const void *value, size_t size) {
  memcpy(b->bytes + at, value, size);
}
#define PUT(b, at, type, value) put(b, at, &(type){value}, sizeof(type))

/* v4 has one byte of type, and no more than rubbish behind it. */
static inline struct blob blank(int version, uint64_t type, void *parent, int rank) {
  struct blob b;
  memset(&b, 0xA5, sizeof(b));
  if (version >= 5) {
    PUT(&b, 0, uint64_t, type);
  } else {
    PUT(&b, 0, uint8_t, (uint8_t)type);
  }
  PUT(&b, 8, void *, parent);
  PUT(&b, 16, int32_t, rank);
  return b;
}

/* Below v5 the plan is the parent; from v5 on the call is, and the plan stands in the tail. */
static inline struct blob coll(int version, int rank, void *call, void *plan, uint64_t seq,
                               const char *func, uint64_t count, const char *dtype, int root,
                               int channels) {
  struct blob b = blank(version, 2, version >= 5 ? call : plan, rank);
  PUT(&b, 24, uint64_t, seq);
  PUT(&b, 32, const char *, func);
  PUT(&b, 56, uint64_t, count);
  PUT(&b, 64, int32_t, root);
  PUT(&b, 72, const char *, dtype);
  PUT(&b, 80, uint8_t, (uint8_t)channels);
  PUT(&b, 81, uint8_t, 16);
  if (version >= 5) PUT(&b, 104, void *, plan);
  if (version >= 7) PUT(&b, 128, uint64_t, 77);
  return b;
}

static inline struct blob p2p(int version, int rank, void *call, void *plan, const char *func,
                              uint64_t count, const char *dtype, int peer, int channels) {
  struct blob b = blank(version, 4, version >= 5 ? call : plan, rank);
  PUT(&b, 24, const char *, func);
  PUT(&b, 40, const char *, dtype);
  PUT(&b, 48, uint64_t, count);
  PUT(&b, 56, int32_t, peer);
  PUT(&b, 60, uint8_t, (uint8_t)channels);
  if (version >= 5) PUT(&b, 64, void *, plan);
  if (version >= 7) PUT(&b, 72, uint64_t, 77);
  return b;
}

static inline struct blob kernel(int version, int rank, void *task, int channel, uint64_t timer) {
  struct blob b = blank(version, 64, task, rank);
  PUT(&b, 24, uint8_t, (uint8_t)channel);
  PUT(&b, 32, uint64_t, timer);
  return b;
}

/* 256: the outermost group; 512: a collective; 1024: a send or receive. */
static inline struct blob call(int version, int type, void *group, int captured) {
  struct blob b = blank(version, (uint64_t)type, group, 0);
  PUT(&b, type == 256 ? 24 : type == 512 ? 64 : 56, uint8_t, (uint8_t)captured);
  return b;
}

static inline int call_init(const struct vtable *t, int version, void **context, uint64_t hash,
                            int *mask, const char *name, int nodes, int ranks, int rank) {
  typedef void (*logger)(int, unsigned long, const char *, int, const char *, ...);
  if (version >= 5) {
    int (*fn)(void **, uint64_t, int *, const char *, int, int, int, logger) = (void *)t->init;
    return fn(context, hash, mask, name, nodes, ranks, rank, (logger)0);
  }
  int (*fn)(void **, int *, const char *, uint64_t, int, int, int, logger) = (void *)t->init;
  return fn(context, mask, name, hash, nodes, ranks, rank, (logger)0);
}

#endif
