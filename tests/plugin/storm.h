/* SPDX-License-Identifier: Apache-2.0 */
#ifndef PLUGIN_TEST_STORM_H
#define PLUGIN_TEST_STORM_H

#include "nccl.h"

/* Many communicators at once, each with a launching and two watching threads, in random order. */
void storm(const struct vtable *table, int version, int comms, int ops, unsigned seed);

#endif
