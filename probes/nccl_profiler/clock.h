/* SPDX-License-Identifier: Apache-2.0 */
/* From the GPU's timer to CLOCK_MONOTONIC.
 *
 * NCCL hands a GPU timestamp over some time after it was taken, never before. So host time at the
 * hand-over minus GPU time is the offset plus a delay that is not negative, and the smallest of
 * many such differences is closest to the offset. The two clocks drift, so old samples must go:
 * the minimum is over the current second and the one before. */
#ifndef LANTERNE_CLOCK_H
#define LANTERNE_CLOCK_H

#include <stdbool.h>
#include <stdint.h>
#include <time.h>

struct calibration {
  uint64_t current_end; /* host time at which the current second is over; 0: no sample yet */
  int64_t current, previous;
  bool has_previous;
};

enum { CALIBRATION_NS = 1000000000 };

static inline uint64_t host_ns(void) {
  struct timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static inline void calibrate(struct calibration *c, uint64_t host, uint64_t gpu) {
  int64_t sample = (int64_t)(host - gpu);
  if (host >= c->current_end) {
    c->has_previous = c->current_end && host < c->current_end + CALIBRATION_NS;
    c->previous = c->current;
    c->current = sample;
    c->current_end = host + CALIBRATION_NS;
  } else if (sample < c->current) {
    c->current = sample;
  }
}

static inline int64_t offset_of(const struct calibration *c) {
  return c->has_previous && c->previous < c->current ? c->previous : c->current;
}

#endif
