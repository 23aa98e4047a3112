/* SPDX-License-Identifier: Apache-2.0 */
/* Settings from the environment, read once. */
#ifndef LANTERNE_OPTIONS_H
#define LANTERNE_OPTIONS_H

#include <stdint.h>

enum mode {
  MODE_DEMAND, /* NCCL is asked for GPU events while somebody listens */
  MODE_ALWAYS, /* all the time, so that graphs captured earlier can be seen later */
  MODE_OFF,
};

struct options {
  enum mode mode;
  unsigned channels; /* of a collective, watched at most; 0: all */
  unsigned pool;     /* open operations a communicator */
  uint64_t settle_ns; /* an operation that was complete for so long settles those before it */
};

const struct options *options_get(void);

#endif
