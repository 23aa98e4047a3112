/* The one internal function that every collective and point-to-point call goes through. */
#include "comm.h"

static ncclResult_t checkArguments(const struct ncclInfo *info) {
  const struct ncclComm *comm = info->comm;
  bool rooted = info->coll == ncclFuncBroadcast || info->coll == ncclFuncReduce ||
                info->coll == ncclFuncSend || info->coll == ncclFuncRecv ||
                info->coll == ncclFuncGather || info->coll == ncclFuncScatter;
  bool p2p = info->coll == ncclFuncSend || info->coll == ncclFuncRecv;
  if (rooted && (info->root < 0 || info->root >= comm->nRanks)) {
    rigWarn("%s : invalid root %d (root should be in the 0..%d range)", info->opName, info->root,
            comm->nRanks);
    return ncclInvalidArgument;
  }
  if (!typeSize(info->datatype)) {
    rigWarn("%s : invalid type %d", info->opName, (int)info->datatype);
    return ncclInvalidArgument;
  }
  int user = (int)info->op - ncclNumOps;
  if (user >= MAX_USER_OPS || (int)info->op < 0 || (user >= 0 && !comm->rig->userOps[user].used)) {
    rigWarn("%s : invalid reduction operation %d", info->opName, (int)info->op);
    return ncclInvalidArgument;
  }
  bool atRoot = info->root == comm->rank;
  bool sends = !p2p && (info->coll != ncclFuncBroadcast || atRoot) &&
               (info->coll != ncclFuncScatter || atRoot);
  bool receives = p2p || (info->coll != ncclFuncReduce || atRoot);
  if (info->coll == ncclFuncGather && !atRoot) receives = false;
  if (info->count && ((sends && !info->sendbuff) || (receives && !info->recvbuff))) {
    rigWarn("%s : NULL buffer", info->opName);
    return ncclInvalidArgument;
  }
  return ncclSuccess;
}

static ncclResult_t checkReady(const struct ncclComm *comm) {
  struct rigComm *rc = comm->rig;
  if (atomic_load(&rc->asyncError) == ncclInProgress) {
    rigWarn("Attempt to use communicator before the previous operation returned ncclSuccess");
    return ncclInvalidArgument;
  }
  if (atomic_load(&rc->revoked)) return ncclInvalidUsage;
  int error = atomic_load(&rc->asyncError);
  return error ? (ncclResult_t)error : ncclSuccess;
}

/* noinline: it must stay a function that a probe can find in .symtab. */
__attribute__((noinline)) ncclResult_t ncclEnqueueCheck(struct ncclInfo *info) {
  groupStartInternal();
  ncclResult_t result = ncclCommCheck(info->comm);
  if (!result) result = checkReady(info->comm);
  if (!result) result = checkArguments(info);
  if (!result && !groupAddTask(info)) result = ncclInternalError;
  groupFail(result);
  ncclResult_t end = groupEndInternal(NULL);
  return result ? result : end;
}
