/* SPDX-License-Identifier: Apache-2.0 */
/* Settings from the environment, read once. */
#ifndef LANTERNE_OPTIONS_H
#define LANTERNE_OPTIONS_H

enum mode {
  MODE_DEMAND, /* NCCL is asked for GPU events while somebody listens */
  MODE_ALWAYS, /* all the time, so that graphs captured earlier can be seen later */
  MODE_OFF,
};

struct options {
  enum mode mode;
  unsigned channels; /* of a collective, watched at most; 0: all */
  unsigned pool;     /* open operations a communicator */
};

const struct options *options_get(void);

#endif
