/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LANTERNE_EVENTS_H
#define LANTERNE_EVENTS_H

#include "abi.h"
#include "context.h"

void *event_start(struct context *c, uint64_t type, const struct descriptor *d);
void event_stop(void *handle);
void event_state(void *handle, int state, const uint64_t *arguments);
void events_end(struct context *c);

#endif
