#include "routing.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { UNIT_BITS = 20 };

static uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/* Place of an expert in the layer's popularity order: its hash's rank among all. */
static int popularity(const struct routing *r, uint64_t layerKey, int expert) {
  uint64_t own = mix(layerKey + (uint64_t)expert);
  int place = 0;
  for (int other = 0; other < r->experts; other++) {
    uint64_t key = mix(layerKey + (uint64_t)other);
    place += key < own || (key == own && other < expert);
  }
  return place;
}

static int64_t weights(const struct routing *r, uint64_t layer, int hot, int64_t *out) {
  uint64_t layerKey = mix(r->seed ^ mix(layer ^ 0x6c61796572u));
  int64_t sum = 0;
  for (int e = 0; e < r->experts; e++) {
    double share = pow((double)(popularity(r, layerKey, e) + 1), -r->zipf);
    out[e] = (int64_t)(share * (double)(1 << UNIT_BITS));
    if (out[e] < 1) out[e] = 1;
    if (hot && e == r->hotExpert) out[e] = (int64_t)((double)out[e] * r->hotFactor);
    sum += out[e];
  }
  return sum;
}

/* The expected count plus noise of about its square root, as independent choices would give. */
static int64_t drawCount(const struct routing *r, int64_t weight, int64_t sum, uint64_t random) {
  const int64_t divisor = 16 * 37837; /* 16: fixed point; 37837: deviation of the four halves */
  int64_t mean = (int64_t)r->tokens * r->topk * weight / sum;
  int64_t root = (int64_t)sqrt((double)(mean * 256));
  int64_t bell = -131070;
  for (int i = 0; i < 4; i++) bell += (int64_t)((random >> (16 * i)) & 0xffff);
  int64_t product = root * bell, noise = product / divisor;
  if (product % divisor < 0) noise--; /* floor, as Python divides */
  int64_t count = mean + noise;
  return count < 0 ? 0 : count > r->tokens ? r->tokens : count;
}

/* Every token has exactly topk experts: spread what is over or missing, beginning somewhere. */
static void settle(const struct routing *r, int64_t *row, uint64_t start) {
  int64_t left = (int64_t)r->tokens * r->topk;
  for (int e = 0; e < r->experts; e++) left -= row[e];
  for (int i = 0; left; i++) {
    int e = (int)((start + (uint64_t)i) % (uint64_t)r->experts);
    int64_t want = left / r->experts;
    if (left % r->experts < 0) want--;
    if (!want) want = 1;
    int64_t room = want > 0 ? r->tokens - row[e] : -row[e];
    if (want > 0 ? want > room : want < room) want = room;
    row[e] += want;
    left -= want;
  }
}

void routingCounts(const struct routing *r, uint64_t step, uint64_t layer, int hot,
                   int64_t *counts) {
  int64_t *share = malloc((size_t)r->experts * sizeof(*share));
  if (!share) abort();
  int64_t sum = weights(r, layer, hot, share);
  for (int rank = 0; rank < r->ranks; rank++) {
    uint64_t key = mix(r->seed + mix(step + mix(layer + mix((uint64_t)rank))));
    int64_t *row = counts + (size_t)rank * (size_t)r->experts;
    for (int e = 0; e < r->experts; e++) {
      row[e] = drawCount(r, share[e], sum, mix(key + (uint64_t)e));
    }
    settle(r, row, key % (uint64_t)r->experts);
  }
  free(share);
}
