/* SPDX-License-Identifier: Apache-2.0 */
/* LANTERNE_PROFILER           demand (default), always, off
 * LANTERNE_PROFILER_CHANNELS  0 (all) to 64, default 8
 * LANTERNE_PROFILER_POOL      16 to 4096 open operations of a communicator, default 512: 128 KiB,
 *                             touched only as far as used
 * LANTERNE_PROFILER_SETTLE_MS 1 to 10000, default 50: how far channels may report out of order
 *
 * Of a collective the first channels to report are watched. All blocks of a kernel start together,
 * so the start is that of all channels within some microseconds. The end of the last of eight is
 * at most earlier than the end of the last of all, by what channels differ, and is so on all ranks:
 * in waits, which are differences between ranks, little of it is left. Of p2p groups every channel
 * is watched, because there another channel is another peer. */
#include "options.h"

#include <pthread.h>
#include <stdlib.h>
#include <strings.h>

static struct options options;
static int known;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static unsigned number(const char *name, unsigned low, unsigned high, unsigned standard) {
  const char *text = getenv(name);
  char *end = NULL;
  if (!text || !*text) return standard;
  unsigned long value = strtoul(text, &end, 10);
  if (*end) return standard;
  return value < low ? low : value > high ? high : (unsigned)value;
}

static enum mode mode(void) {
  const char *text = getenv("LANTERNE_PROFILER");
  if (text && !strcasecmp(text, "always")) return MODE_ALWAYS;
  if (text && !strcasecmp(text, "off")) return MODE_OFF;
  return MODE_DEMAND;
}

const struct options *options_get(void) {
  pthread_mutex_lock(&lock);
  if (!known) {
    options.mode = mode();
    options.channels = number("LANTERNE_PROFILER_CHANNELS", 0, 64, 8);
    options.pool = number("LANTERNE_PROFILER_POOL", 16, 4096, 512);
    options.settle_ns = number("LANTERNE_PROFILER_SETTLE_MS", 1, 10000, 50) * (uint64_t)1000000;
    known = 1;
  }
  pthread_mutex_unlock(&lock);
  return &options;
}
