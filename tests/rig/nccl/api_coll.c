/* The exported collectives and groups: fill an ncclInfo, hand it to ncclEnqueueCheck. */
#include "comm.h"
#include "export.h"

RIG_EXPORT(ncclGroupStart, void) { return groupStartInternal(); }

RIG_EXPORT(ncclGroupEnd, void) { return groupEndInternal(NULL); }

RIG_EXPORT(ncclAllReduce, const void *sendbuff, void *recvbuff, size_t count,
           ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, ncclStream_t stream) {
  struct ncclInfo info = {ncclFuncAllReduce, "AllReduce", sendbuff, recvbuff, count, datatype,
                          op,                0,           comm,     stream,   2,     4};
  return ncclEnqueueCheck(&info);
}

RIG_EXPORT(ncclBroadcast, const void *sendbuff, void *recvbuff, size_t count,
           ncclDataType_t datatype, int root, ncclComm_t comm, ncclStream_t stream) {
  struct ncclInfo info = {ncclFuncBroadcast, "Broadcast", sendbuff, recvbuff, count, datatype,
                          ncclSum,           root,        comm,     stream,   1,     1};
  return ncclEnqueueCheck(&info);
}

/* Through the PLT, so a probe on ncclBroadcast sees it too. */
RIG_EXPORT(ncclBcast, void *buff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm,
           ncclStream_t stream) {
  return ncclBroadcast(buff, buff, count, datatype, root, comm, stream);
}

RIG_EXPORT(ncclReduce, const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
           ncclRedOp_t op, int root, ncclComm_t comm, ncclStream_t stream) {
  struct ncclInfo info = {ncclFuncReduce, "Reduce", sendbuff, recvbuff, count, datatype,
                          op,             root,     comm,     stream,   1,     1};
  return ncclEnqueueCheck(&info);
}

RIG_EXPORT(ncclAllGather, const void *sendbuff, void *recvbuff, size_t sendcount,
           ncclDataType_t datatype, ncclComm_t comm, ncclStream_t stream) {
  struct ncclInfo info = {ncclFuncAllGather, "AllGather", sendbuff, recvbuff, sendcount, datatype,
                          ncclSum,           0,           comm,     stream,   2,         4};
  return ncclEnqueueCheck(&info);
}

RIG_EXPORT(ncclReduceScatter, const void *sendbuff, void *recvbuff, size_t recvcount,
           ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, ncclStream_t stream) {
  struct ncclInfo info = {
      ncclFuncReduceScatter, "ReduceScatter", sendbuff, recvbuff, recvcount, datatype,
      op,                    0,               comm,     stream,   2,         4};
  return ncclEnqueueCheck(&info);
}

/* Send and Recv both put their buffer where receivers have theirs. */
RIG_EXPORT(ncclSend, const void *sendbuff, size_t count, ncclDataType_t datatype, int peer,
           ncclComm_t comm, ncclStream_t stream) {
  void *buffer = (void *)(uintptr_t)sendbuff;
  struct ncclInfo info = {ncclFuncSend, "Send", NULL, buffer, count, datatype,
                          ncclSum,      peer,   comm, stream, 1,     1};
  return ncclEnqueueCheck(&info);
}

RIG_EXPORT(ncclRecv, void *recvbuff, size_t count, ncclDataType_t datatype, int peer,
           ncclComm_t comm, ncclStream_t stream) {
  struct ncclInfo info = {ncclFuncRecv, "Recv", NULL, recvbuff, count, datatype,
                          ncclSum,      peer,   comm, stream,   1,     1};
  return ncclEnqueueCheck(&info);
}

#if RIG_NCCL_VERSION >= 22800
RIG_EXPORT(ncclGroupSimulateEnd, ncclSimInfo_t *info) {
  ncclSimInfo_t unused;
  return groupEndInternal(info ? info : &unused);
}

RIG_EXPORT(ncclAlltoAll, const void *sendbuff, void *recvbuff, size_t count,
           ncclDataType_t datatype, ncclComm_t comm, ncclStream_t stream) {
  struct ncclInfo info = {ncclFuncAlltoAll, "AlltoAll", sendbuff, recvbuff, count, datatype,
                          ncclSum,          0,          comm,     stream,   1,     1};
  return ncclEnqueueCheck(&info);
}

RIG_EXPORT(ncclGather, const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
           int root, ncclComm_t comm, ncclStream_t stream) {
  struct ncclInfo info = {ncclFuncGather, "Gather", sendbuff, recvbuff, count, datatype,
                          ncclSum,        root,     comm,     stream,   1,     1};
  return ncclEnqueueCheck(&info);
}

RIG_EXPORT(ncclScatter, const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
           int root, ncclComm_t comm, ncclStream_t stream) {
  struct ncclInfo info = {ncclFuncScatter, "Scatter", sendbuff, recvbuff, count, datatype,
                          ncclSum,         root,      comm,     stream,   1,     1};
  return ncclEnqueueCheck(&info);
}
#endif
