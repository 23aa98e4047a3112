/* Collectives. All-reduce, all-gather and reduce-scatter go through slots that every rank fills
 * and all read after a barrier; the slots are double-buffered, so a chunk costs one barrier.
 * Broadcast and reduce are made of transfers, so a root need not wait for anybody it does not
 * need, as on real hardware. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "exec.h"

bool isP2p(ncclFunc_t coll) {
  return coll == ncclFuncSend || coll == ncclFuncRecv || coll == ncclFuncAlltoAll ||
         coll == ncclFuncGather || coll == ncclFuncScatter;
}

static const char *at(const void *buffer, size_t offset) { return (const char *)buffer + offset; }

bool expandP2p(struct rigComm *rc, const struct ncclInfo *info, struct xferList *out) {
  int n = rc->comm->nRanks, self = rc->comm->rank, root = info->root;
  size_t part = info->count * typeSize(info->datatype);
  const void *in = info->sendbuff;
  bool good = true;
  switch (info->coll) {
    case ncclFuncSend: return xferAdd(out, root, true, info->recvbuff, part);
    case ncclFuncRecv: return xferAdd(out, root, false, info->recvbuff, part);
    case ncclFuncGather: good = xferAdd(out, root, true, in, part); break;
    case ncclFuncScatter: good = xferAdd(out, root, false, info->recvbuff, part); break;
    default: break;
  }
  for (int peer = 0; peer < n && good; peer++) {
    size_t offset = (size_t)peer * part;
    if (info->coll == ncclFuncAlltoAll || (info->coll == ncclFuncScatter && self == root)) {
      good = xferAdd(out, peer, true, at(in, offset), part);
    }
    if (info->coll == ncclFuncAlltoAll || (info->coll == ncclFuncGather && self == root)) {
      good = good && xferAdd(out, peer, false, at(info->recvbuff, offset), part);
    }
  }
  return good;
}

static void pause_(uint64_t ns) {
  struct timespec ts = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
  if (ns) nanosleep(&ts, NULL);
}

static void delayOwnData(struct segment *seg, uint64_t step) {
  pause_(faultSender(seg->peers[seg->rank].globalRank, step));
}

static void delayOwnView(struct segment *seg, uint64_t step) {
  int self = seg->peers[seg->rank].globalRank;
  uint64_t path = 0;
  for (int i = 0; i < seg->nranks; i++) {
    uint64_t one = faultPath(seg->peers[i].globalRank, self, step);
    if (one > path) path = one;
  }
  pause_(faultReceiver(self, step) + path);
}

static void reduceSlots(struct rigComm *rc, char *out, size_t offset, size_t count, uint64_t parity,
                        const struct ncclInfo *info) {
  int n = rc->seg->nranks;
  memcpy(out, segSlot(rc->seg, 0, parity) + offset, count * typeSize(info->datatype));
  for (int rank = 1; rank < n; rank++) {
    reduceInto(out, segSlot(rc->seg, rank, parity) + offset, count, info->datatype, info->op);
  }
  reduceFinish(out, count, info->datatype, info->op, n);
}

static ncclResult_t allReduce(struct rigComm *rc, const struct ncclInfo *info) {
  size_t size = typeSize(info->datatype), most = rc->seg->slotBytes / size;
  for (size_t done = 0; done < info->count; done += most) {
    size_t part = info->count - done < most ? info->count - done : most;
    uint64_t parity = rc->chunkCount++;
    char *slot = segSlot(rc->seg, rc->seg->rank, parity);
    memcpy(slot, at(info->sendbuff, done * size), part * size);
    reduceScale(rc, slot, part, info->datatype, info->op);
    ncclResult_t result = segBarrier(rc, &rc->seg->head->work);
    if (result) return result;
    reduceSlots(rc, (char *)info->recvbuff + done * size, 0, part, parity, info);
  }
  return ncclSuccess;
}

static ncclResult_t allGather(struct rigComm *rc, const struct ncclInfo *info) {
  size_t bytes = info->count * typeSize(info->datatype), most = rc->seg->slotBytes;
  for (size_t done = 0; done < bytes; done += most) {
    size_t part = bytes - done < most ? bytes - done : most;
    uint64_t parity = rc->chunkCount++;
    memcpy(segSlot(rc->seg, rc->seg->rank, parity), at(info->sendbuff, done), part);
    ncclResult_t result = segBarrier(rc, &rc->seg->head->work);
    if (result) return result;
    for (int rank = 0; rank < rc->seg->nranks; rank++) {
      memcpy((char *)info->recvbuff + (size_t)rank * bytes + done, segSlot(rc->seg, rank, parity),
             part);
    }
  }
  return ncclSuccess;
}

/* A slot holds one piece for each receiver. */
static ncclResult_t reduceScatter(struct rigComm *rc, const struct ncclInfo *info) {
  size_t n = (size_t)rc->seg->nranks, size = typeSize(info->datatype);
  size_t most = rc->seg->slotBytes / n / 8 * 8 / size;
  if (!most) return ncclInternalError;
  for (size_t done = 0; done < info->count; done += most) {
    size_t part = info->count - done < most ? info->count - done : most;
    uint64_t parity = rc->chunkCount++;
    char *slot = segSlot(rc->seg, rc->seg->rank, parity);
    for (size_t rank = 0; rank < n; rank++) {
      char *piece = slot + rank * most * size;
      memcpy(piece, at(info->sendbuff, (rank * info->count + done) * size), part * size);
      reduceScale(rc, piece, part, info->datatype, info->op);
    }
    ncclResult_t result = segBarrier(rc, &rc->seg->head->work);
    if (result) return result;
    size_t mine = (size_t)rc->seg->rank * most * size;
    reduceSlots(rc, (char *)info->recvbuff + done * size, mine, part, parity, info);
  }
  return ncclSuccess;
}

static ncclResult_t broadcast(struct rigComm *rc, const struct ncclInfo *info, uint64_t step) {
  size_t bytes = info->count * typeSize(info->datatype);
  struct xferList list = {0};
  bool good = true;
  if (rc->comm->rank != info->root) {
    good = xferAdd(&list, info->root, false, info->recvbuff, bytes);
  } else {
    for (int peer = 0; peer < rc->comm->nRanks && good; peer++) {
      if (peer != info->root) good = xferAdd(&list, peer, true, info->sendbuff, bytes);
    }
    if (info->recvbuff != info->sendbuff) memmove(info->recvbuff, info->sendbuff, bytes);
  }
  ncclResult_t result = good ? transferAll(rc, &list, step) : ncclSystemError;
  free(list.items);
  return result;
}

static ncclResult_t reduceToRoot(struct rigComm *rc, const struct ncclInfo *info, uint64_t step) {
  int n = rc->comm->nRanks, self = rc->comm->rank;
  bool root = self == info->root, good = true;
  size_t bytes = info->count * typeSize(info->datatype);
  char *all = malloc(bytes * (size_t)(root ? n : 1));
  if (!all) return ncclSystemError;
  char *own = root ? all + (size_t)self * bytes : all;
  memcpy(own, info->sendbuff, bytes);
  reduceScale(rc, own, info->count, info->datatype, info->op);
  struct xferList list = {0};
  for (int peer = 0; root && peer < n && good; peer++) {
    if (peer != self) good = xferAdd(&list, peer, false, all + (size_t)peer * bytes, bytes);
  }
  if (!root) good = xferAdd(&list, info->root, true, own, bytes);
  ncclResult_t result = good ? transferAll(rc, &list, step) : ncclSystemError;
  if (root && !result) {
    for (int peer = 1; peer < n; peer++) {
      reduceInto(all, all + (size_t)peer * bytes, info->count, info->datatype, info->op);
    }
    reduceFinish(all, info->count, info->datatype, info->op, n);
    memcpy(info->recvbuff, all, bytes);
  }
  free(list.items);
  free(all);
  return result;
}

ncclResult_t collectiveRun(struct rigComm *rc, const struct ncclInfo *info, uint64_t step) {
  if (info->coll == ncclFuncBroadcast) return broadcast(rc, info, step);
  if (info->coll == ncclFuncReduce) return reduceToRoot(rc, info, step);
  delayOwnData(rc->seg, step);
  ncclResult_t result = ncclInternalError;
  if (info->coll == ncclFuncAllReduce) result = allReduce(rc, info);
  if (info->coll == ncclFuncAllGather) result = allGather(rc, info);
  if (info->coll == ncclFuncReduceScatter) result = reduceScatter(rc, info);
  delayOwnView(rc->seg, step);
  return result;
}
