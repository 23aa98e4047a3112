/* SPDX-License-Identifier: Apache-2.0 */
/* NCCL's profiler interface, v4 to v7, as far as this plugin reads it.
 *
 * All versions have the same table. Of the descriptor, v5 and later have a 64-bit type and longer
 * tails; what is read here lies at the same offset in all of them, but for parentGroup, which v4
 * has as the parent itself. v7 was read in the 2.31 and 2.32 binaries. */
#ifndef LANTERNE_ABI_H
#define LANTERNE_ABI_H

#include <stddef.h>
#include <stdint.h>

enum event_type {
  EVENT_GROUP = 1,         /* one kernel plan */
  EVENT_COLL = 2,
  EVENT_P2P = 4,
  EVENT_KERNEL_CH = 64,
  EVENT_GROUP_API = 256,   /* v5: one outermost group, which a lone call is too */
  EVENT_COLL_API = 512,
  EVENT_P2P_API = 1024,
};

enum { STATE_KERNEL_CH_STOP = 22 };

struct descriptor {
  uint64_t type; /* v4: only the first byte */
  void *parent;
  int rank;
  union {
    struct {
      uint64_t seq;
      const char *func;
      const void *send;
      void *recv;
      size_t count;
      int root;
      const char *datatype;
      uint8_t channels, warps;
      const char *algorithm, *protocol;
      void *group; /* v5+ */
    } coll;
    struct {
      const char *func;
      void *buffer;
      const char *datatype;
      size_t count;
      int peer;
      uint8_t channels;
      void *group; /* v5+ */
    } p2p;
    struct {
      uint8_t channel;
      uint64_t timer;
    } kernel;
    struct {
      const char *func;
      size_t count;
      const char *datatype;
      int root;
      void *stream;
      _Bool captured;
    } coll_api;
    struct {
      const char *func;
      size_t count;
      const char *datatype;
      void *stream;
      _Bool captured;
    } p2p_api;
  };
};

_Static_assert(offsetof(struct descriptor, parent) == 8, "NCCL's ABI");
_Static_assert(offsetof(struct descriptor, coll.func) == 32, "NCCL's ABI");
_Static_assert(offsetof(struct descriptor, coll.count) == 56, "NCCL's ABI");
_Static_assert(offsetof(struct descriptor, coll.datatype) == 72, "NCCL's ABI");
_Static_assert(offsetof(struct descriptor, coll.channels) == 80, "NCCL's ABI");
_Static_assert(offsetof(struct descriptor, coll.group) == 104, "NCCL's ABI");
_Static_assert(offsetof(struct descriptor, p2p.datatype) == 40, "NCCL's ABI");
_Static_assert(offsetof(struct descriptor, p2p.channels) == 60, "NCCL's ABI");
_Static_assert(offsetof(struct descriptor, p2p.group) == 64, "NCCL's ABI");
_Static_assert(offsetof(struct descriptor, kernel.timer) == 32, "NCCL's ABI");
_Static_assert(offsetof(struct descriptor, coll_api.captured) == 64, "NCCL's ABI");
_Static_assert(offsetof(struct descriptor, p2p_api.captured) == 56, "NCCL's ABI");

/* Level 3 is INFO, flag 1 is INIT. */
typedef void (*nccl_logger)(int level, unsigned long flags, const char *file, int line,
                            const char *format, ...);

struct table {
  const char *name;
  void *init; /* its arguments differ by version */
  int (*start)(void *context, void **handle, struct descriptor *what);
  int (*stop)(void *handle);
  int (*state)(void *handle, int state, const uint64_t *arguments);
  int (*finalize)(void *context);
};
_Static_assert(sizeof(struct table) == 48, "NCCL's ABI");

#endif
