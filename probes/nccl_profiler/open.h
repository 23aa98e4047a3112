/* SPDX-License-Identifier: Apache-2.0 */
/* Where the open operations are, for somebody who reads this process's memory from outside.
 *
 * An operation is told of when it is over. Of one that does not end nothing ever comes, so an agent
 * that has not heard of a communicator for some time looks here: the section `lanterne_open` of the
 * library holds one struct lanterne_open, and from there on pointers lead to contexts and to their
 * operations by age. Nothing here is ever freed. The reader takes no lock: what it sees may be half
 * changed, and it checks that. The mirror is open_memory.py; a change of what is asserted in
 * context.h needs another version. */
#ifndef LANTERNE_OPEN_H
#define LANTERNE_OPEN_H

#include <stdint.h>

#define LANTERNE_OPEN_MAGIC 0x4e504f4c /* "LOPN" */
#define LANTERNE_OPEN_VERSION 1

struct context;

struct lanterne_open {
  uint32_t magic, version;
  struct context *newest; /* made last; `made_before` leads on */
};

#endif
