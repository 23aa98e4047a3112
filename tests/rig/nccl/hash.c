/* commHash, as NCCL computes it: the key that joins the ranks of one communicator. */
#include <stdio.h>
#include <string.h>

#include "comm.h"

struct accumulator {
  uint64_t a, b;
};

/* Where one piece ends and the next begins matters: each piece mixes its length in first. */
static void eat(struct accumulator *acc, const void *bytes, size_t size) {
  const char *at = bytes;
  acc->a ^= size;
  while (size) {
    size_t part = size < 8 ? size : 8;
    uint64_t chunk = 0;
    memcpy(&chunk, at, part);
    acc->a += acc->b;
    acc->b ^= acc->a;
    acc->a ^= acc->a >> 31;
    acc->a *= 0x9de62bbc8cef3ce3u;
    acc->b ^= acc->b >> 32;
    acc->b *= 0x485cd6311b599e79u;
    acc->a += chunk;
    at += part;
    size -= part;
  }
}

static uint64_t digest(const struct accumulator *acc) {
  uint64_t h = acc->a;
  h ^= h >> 31;
  h *= 0xbac3bd562846de6bu;
  h += acc->b;
  h ^= h >> 32;
  return h * 0x995a187a14e7b445u;
}

uint64_t hashNew(const void *bytes, size_t size) {
  struct accumulator acc = {1, 1};
  eat(&acc, bytes, size);
  return digest(&acc);
}

/* Up to 2.25. The bytes are signed, which shows in the high half. */
uint64_t hashOld(const void *bytes, size_t size) {
  uint64_t h = 5381;
  for (size_t i = 0; i < size; i++) h = h * 33 ^ (uint64_t)(int64_t)((const signed char *)bytes)[i];
  return h;
}

uint64_t hashCombine(uint64_t base, uint64_t value) {
  struct accumulator acc = {1, 1};
  eat(&acc, &base, sizeof(base));
  eat(&acc, &value, sizeof(value));
  return digest(&acc);
}

uint64_t hashChildNew(uint64_t parent, int childCount, int color) {
  struct accumulator acc = {1, 1};
  eat(&acc, &parent, sizeof(parent));
  eat(&acc, &childCount, sizeof(childCount));
  eat(&acc, &color, sizeof(color));
  return digest(&acc);
}

#if RIG_NCCL_VERSION < 22600
uint64_t hashUniqueId(const ncclUniqueId *id) { return hashOld(id, sizeof(*id)); }

/* Has no count, so two splits with one colour get the same hash: a trap worth keeping. */
uint64_t hashChild(uint64_t parent, int childCount, int color) {
  char text[128] = {0};
  (void)childCount;
  snprintf(text, sizeof(text), "%016lx-%d", (unsigned long)parent, color);
  return hashOld(text, sizeof(text));
}
#else
uint64_t hashUniqueId(const ncclUniqueId *id) { return hashNew(id, sizeof(*id)); }

uint64_t hashChild(uint64_t parent, int childCount, int color) {
  return hashChildNew(parent, childCount, color);
}
#endif
