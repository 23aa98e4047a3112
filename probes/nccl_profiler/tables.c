/* SPDX-License-Identifier: Apache-2.0 */
/* The exported tables. NCCL takes the newest that it knows. Nothing here ever reports a failure:
 * where something goes wrong, the job runs on as if there were no plugin. */
#include <stdatomic.h>

#include "abi.h"
#include "events.h"
#include "mask.h"
#include "options.h"
#include "probes.h"

static int init(void **context, uint64_t hash, void *mask, const char *name, int nodes, int ranks,
                int rank, nccl_logger log, int version) {
  static atomic_flag said = ATOMIC_FLAG_INIT;
  if (!context) return 0;
  *context = NULL;
  const struct options *options = options_get();
  /* The mask is one for all communicators: on trouble it stays as others need it. */
  if (options->mode == MODE_OFF || !mask) return 0;
  struct context *c = context_take(hash, rank, ranks, options->pool);
  if (!c) return 0;
  mask_first(c, mask, version);
  *context = c;
  tell_init(hash, rank, ranks, nodes, name);
  if (log && !atomic_flag_test_and_set(&said)) {
    log(3, 1, __FILE_NAME__, __LINE__, "lanterne profiler plugin: ready for an agent");
  }
  return 0;
}

static int init_v4(void **context, void *mask, const char *name, uint64_t hash, int nodes,
                   int ranks, int rank, nccl_logger log) {
  return init(context, hash, mask, name, nodes, ranks, rank, log, 4);
}

static int init_v5(void **context, uint64_t hash, void *mask, const char *name, int nodes,
                   int ranks, int rank, nccl_logger log) {
  return init(context, hash, mask, name, nodes, ranks, rank, log, 5);
}

static int start(void *context, void **handle, const struct descriptor *d, uint64_t type) {
  if (handle) *handle = context ? event_start(context, type, d) : NULL;
  return 0;
}

static int start_v4(void *context, void **handle, struct descriptor *d) {
  return d ? start(context, handle, d, *(const uint8_t *)d) : 0;
}

static int start_v5(void *context, void **handle, struct descriptor *d) {
  return d ? start(context, handle, d, d->type) : 0;
}

static int stop(void *handle) {
  event_stop(handle);
  return 0;
}

static int state(void *handle, int what, const uint64_t *arguments) {
  event_state(handle, what, arguments);
  return 0;
}

static int finalize(void *context) {
  if (!context) return 0;
  events_end(context);
  context_give(context);
  return 0;
}

#define TABLE(version, like)                                                     \
  __attribute__((visibility("default"))) struct table ncclProfiler_v##version = { \
      "lanterne", init_v##like, start_v##like, stop, state, finalize}

TABLE(4, 4);
TABLE(5, 5);
TABLE(6, 5);
TABLE(7, 5);
