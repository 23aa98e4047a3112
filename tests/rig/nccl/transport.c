/* Point-to-point transfers through the pair channels.
 *
 * As over NVLink, a send that fits into the channel ends before its receiver arrives; a longer one
 * needs the receiver to make room. All transfers of a list progress together, so a ring of sends
 * and receives cannot deadlock. */
#include <stdlib.h>
#include <string.h>

#include "exec.h"

/* What all transfers of one operation have in common. */
struct pass {
  uint64_t step, beginNs;
};

struct lanes {
  struct xfer *items;
  int *sendHead, *recvHead; /* by peer: first unfinished transfer, or -1 */
  int *peers;               /* peers with anything left */
  int peerCount;
};

bool xferAdd(struct xferList *list, int peer, bool send, const void *buffer, size_t bytes) {
  if (list->len == list->cap) {
    int cap = list->cap ? 2 * list->cap : 16;
    struct xfer *items = realloc(list->items, (size_t)cap * sizeof(*items));
    if (!items) return false;
    list->items = items;
    list->cap = cap;
  }
  list->items[list->len++] =
      (struct xfer){.peer = peer, .send = send, .buffer = (char *)(uintptr_t)buffer, .bytes = bytes};
  return true;
}

/* The k-th send to oneself belongs to the k-th receive from oneself. */
static ncclResult_t copyToSelf(struct xferList *list, int self) {
  int in = 0;
  for (int out = 0; out < list->len; out++) {
    struct xfer *send = &list->items[out];
    if (send->peer != self || !send->send || !send->bytes) continue;
    while (in < list->len && (list->items[in].peer != self || list->items[in].send)) in++;
    if (in == list->len || list->items[in].bytes != send->bytes) {
      rigWarn("send to self without its receive in the same group");
      return ncclInvalidUsage;
    }
    memmove(list->items[in].buffer, send->buffer, send->bytes);
    in++;
  }
  return ncclSuccess;
}

static bool lanesInit(struct lanes *l, struct xferList *list, int nranks, int self) {
  l->items = list->items;
  l->sendHead = malloc(3 * (size_t)nranks * sizeof(int));
  if (!l->sendHead) return false;
  l->recvHead = l->sendHead + nranks;
  l->peers = l->recvHead + nranks;
  for (int i = 0; i < 2 * nranks; i++) l->sendHead[i] = -1;
  for (int i = list->len - 1; i >= 0; i--) {
    struct xfer *x = &list->items[i];
    if (x->peer == self || !x->bytes) continue;
    int *head = x->send ? &l->sendHead[x->peer] : &l->recvHead[x->peer];
    x->done = 0; /* a captured list runs again and again */
    x->readyNs = x->doneNs = 0;
    x->next = *head;
    *head = i;
  }
  l->peerCount = 0;
  /* Start behind oneself, so that not all ranks begin with rank 0. */
  for (int i = 1; i < nranks; i++) {
    int peer = (self + i) % nranks;
    if (l->sendHead[peer] >= 0 || l->recvHead[peer] >= 0) l->peers[l->peerCount++] = peer;
  }
  return true;
}

static void ring(struct shmPeer *peer) {
  uint32_t bell = atomic_fetch_add(&peer->bell, 1) + 1;
  if (!atomic_load(&peer->sleeping)) return;
  if ((int32_t)(bell - atomic_load(&peer->wakeAt)) >= 0) segWake(&peer->bell, 1);
}

/* A slow sender's message leaves late. A slow receiver or path costs time from when both sides are
 * there: it is a transfer that takes long, and a receiver that comes late does not save it. */
static uint64_t readyTime(struct segment *seg, int from, uint64_t leftNs, uint64_t beginNs,
                          uint64_t step) {
  int source = seg->peers[from].globalRank, target = seg->peers[seg->rank].globalRank;
  uint64_t both = leftNs > beginNs ? leftNs : beginNs;
  return both + faultReceiver(target, step) + faultPath(source, target, step);
}

static bool pushChunks(struct segment *seg, struct xfer *x, uint64_t step) {
  struct shmChannel *channel = segChannel(seg, seg->rank, x->peer);
  uint32_t head = atomic_load(&channel->head);
  bool moved = false;
  while (x->done < x->bytes) {
    if (head - atomic_load(&channel->tail) == CHANNEL_DEPTH) {
      atomic_store(&channel->senderWaits, 1);
      if (head - atomic_load(&channel->tail) == CHANNEL_DEPTH) break;
    }
    size_t part = x->bytes - x->done;
    if (part > seg->chunkBytes) part = seg->chunkBytes;
    uint64_t delay = x->done ? 0 : faultSender(seg->peers[seg->rank].globalRank, step);
    memcpy(segChunk(seg, seg->rank, x->peer, head), x->buffer + x->done, part);
    channel->length[head % CHANNEL_DEPTH] = (uint32_t)part;
    channel->total[head % CHANNEL_DEPTH] = x->bytes;
    channel->leftNs[head % CHANNEL_DEPTH] = nowNs() + delay;
    atomic_store(&channel->head, ++head);
    x->done += part;
    moved = true;
    ring(&seg->peers[x->peer]);
  }
  return moved;
}

static ncclResult_t pullChunks(struct segment *seg, struct xfer *x, const struct pass *pass,
                               bool *moved, uint64_t *readyAt) {
  struct shmChannel *channel = segChannel(seg, x->peer, seg->rank);
  uint32_t tail = atomic_load(&channel->tail);
  while (x->done < x->bytes && tail != atomic_load(&channel->head)) {
    if (!x->readyNs) {
      uint64_t left = channel->leftNs[tail % CHANNEL_DEPTH];
      x->readyNs = readyTime(seg, x->peer, left, pass->beginNs, pass->step);
    }
    if (x->readyNs > nowNs()) {
      if (!*readyAt || x->readyNs < *readyAt) *readyAt = x->readyNs;
      break;
    }
    uint32_t part = channel->length[tail % CHANNEL_DEPTH];
    if (channel->total[tail % CHANNEL_DEPTH] != x->bytes) {
      rigWarn("rank %d sent %llu bytes where %zu were expected", x->peer,
              (unsigned long long)channel->total[tail % CHANNEL_DEPTH], x->bytes);
      return ncclInvalidUsage;
    }
    memcpy(x->buffer + x->done, segChunk(seg, x->peer, seg->rank, tail), part);
    atomic_store(&channel->tail, ++tail);
    x->done += part;
    *moved = true;
    if (atomic_exchange(&channel->senderWaits, 0)) ring(&seg->peers[x->peer]);
  }
  return ncclSuccess;
}

static ncclResult_t progressPeer(struct segment *seg, struct lanes *l, int peer,
                                 const struct pass *pass, bool *moved, uint64_t *readyAt) {
  while (l->sendHead[peer] >= 0) {
    struct xfer *x = &l->items[l->sendHead[peer]];
    *moved |= pushChunks(seg, x, pass->step);
    if (x->done < x->bytes) break;
    x->doneNs = nowNs();
    l->sendHead[peer] = x->next;
  }
  while (l->recvHead[peer] >= 0) {
    struct xfer *x = &l->items[l->recvHead[peer]];
    ncclResult_t result = pullChunks(seg, x, pass, moved, readyAt);
    if (result) return result;
    if (x->done < x->bytes) break;
    x->doneNs = x->bytes > seg->chunkBytes ? nowNs() : x->readyNs;
    l->recvHead[peer] = x->next;
  }
  return ncclSuccess;
}

static ncclResult_t progress(struct segment *seg, struct lanes *l, const struct pass *pass,
                             bool *moved, uint64_t *readyAt) {
  for (int i = 0; i < l->peerCount;) {
    int peer = l->peers[i];
    ncclResult_t result = progressPeer(seg, l, peer, pass, moved, readyAt);
    if (result) return result;
    bool over = l->sendHead[peer] < 0 && l->recvHead[peer] < 0;
    if (over) {
      l->peers[i] = l->peers[--l->peerCount];
    } else {
      i++;
    }
  }
  return ncclSuccess;
}

/* How often the bell must ring before waking pays. Each receive that is still to come as one chunk
 * rings exactly once; anything longer needs attention at every ring. */
static uint32_t ringsWorthWaiting(struct segment *seg, struct lanes *l) {
  uint32_t expected = 0;
  for (int i = 0; i < l->peerCount; i++) {
    int peer = l->peers[i], in = l->recvHead[peer];
    if (l->sendHead[peer] >= 0) return 1;
    if (l->items[in].bytes > seg->chunkBytes || l->items[in].next >= 0) return 1;
    struct shmChannel *channel = segChannel(seg, peer, seg->rank);
    expected += atomic_load(&channel->tail) == atomic_load(&channel->head);
  }
  return expected ? expected : 1;
}

static ncclResult_t sleepForBell(struct rigComm *rc, struct lanes *l, uint32_t bell,
                                 uint64_t readyAt, uint64_t limit) {
  struct shmPeer *self = &rc->seg->peers[rc->seg->rank];
  ncclResult_t result = ncclSuccess;
  uint32_t wakeAt = bell + (readyAt ? 1 : ringsWorthWaiting(rc->seg, l));
  atomic_store(&self->wakeAt, wakeAt);
  atomic_store(&self->sleeping, 1);
  for (;;) {
    uint32_t now = atomic_load(&self->bell);
    if ((int32_t)(now - wakeAt) >= 0) break;
    if (readyAt && nowNs() >= readyAt) break;
    result = segWait(rc, &self->bell, now, readyAt);
    if (!result && nowNs() > limit) result = ncclRemoteError;
    if (result) break;
  }
  atomic_store(&self->sleeping, 0);
  return result;
}

/* A receiver sleeps until enough has come, and then finds what a device would have taken long ago:
 * each transfer ended when it could, but the last one, with which the operation ends, ends now. */
static void lastEndsNow(struct xferList *list) {
  struct xfer *last = NULL;
  for (int i = 0; i < list->len; i++) {
    struct xfer *x = &list->items[i];
    if (x->doneNs && (!last || x->doneNs > last->doneNs)) last = x;
  }
  if (last) last->doneNs = nowNs();
}

ncclResult_t transferAll(struct rigComm *rc, struct xferList *list, uint64_t step) {
  struct segment *seg = rc->seg;
  struct lanes lanes;
  struct pass pass = {step, nowNs()};
  ncclResult_t result = copyToSelf(list, seg->rank);
  if (result) return result;
  if (!lanesInit(&lanes, list, seg->nranks, seg->rank)) return ncclSystemError;
  while (!result && lanes.peerCount) {
    uint32_t bell = atomic_load(&seg->peers[seg->rank].bell);
    bool moved = false;
    uint64_t readyAt = 0;
    result = progress(seg, &lanes, &pass, &moved, &readyAt);
    if (result || !lanes.peerCount || moved) continue;
    result = sleepForBell(rc, &lanes, bell, readyAt, nowNs() + segTimeoutNs());
  }
  free(lanes.sendHead);
  lastEndsNow(list);
  return result;
}
