/* SPDX-License-Identifier: Apache-2.0 */
#include "mask.h"

#include "options.h"
#include "probes.h"

static int quiet(int version) {
  return version >= 5 ? EVENT_GROUP_API | EVENT_P2P_API : EVENT_GROUP | EVENT_P2P;
}

static int full(int version) {
  int kernels = EVENT_COLL | EVENT_P2P | EVENT_KERNEL_CH;
  return kernels | (version >= 5 ? EVENT_GROUP_API | EVENT_COLL_API | EVENT_P2P_API : EVENT_GROUP);
}

static int wanted(int version) {
  bool now = armed() || options_get()->mode == MODE_ALWAYS;
  return now ? full(version) : quiet(version);
}

void mask_first(struct context *c, _Atomic int *mask, int version) {
  c->version = version;
  atomic_store_explicit(mask, wanted(version), memory_order_relaxed);
  atomic_store_explicit(&c->mask, mask, memory_order_release);
}

void mask_follow(struct context *c) {
  _Atomic int *mask = atomic_load_explicit(&c->mask, memory_order_acquire);
  if (!mask) return;
  int version = c->version, want = wanted(version);
  int now = atomic_load_explicit(mask, memory_order_relaxed);
  /* One of neither is somebody else's will: NCCL's RAS can set the mask from outside. */
  if (now == want || (now != quiet(version) && now != full(version))) return;
  atomic_store_explicit(mask, want, memory_order_relaxed);
}

void mask_forget(struct context *c) { atomic_store_explicit(&c->mask, NULL, memory_order_release); }
