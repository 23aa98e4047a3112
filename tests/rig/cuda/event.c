/* Events: each record is a generation; waiting means waiting for the newest one at the call. */
#include <stdlib.h>

#include "internal.h"

void eventComplete(struct CUevent_st *event, uint64_t gen) {
  pthread_mutex_lock(&event->lock);
  if (!gen) gen = ++event->recorded; /* replayed from a graph */
  if (event->completed < gen) event->completed = gen;
  pthread_cond_broadcast(&event->done);
  pthread_mutex_unlock(&event->lock);
}

void eventWait(struct CUevent_st *event, uint64_t gen) {
  pthread_mutex_lock(&event->lock);
  while (event->completed < gen) pthread_cond_wait(&event->done, &event->lock);
  pthread_mutex_unlock(&event->lock);
}

static uint64_t eventRecorded(struct CUevent_st *event, bool advance) {
  pthread_mutex_lock(&event->lock);
  uint64_t gen = advance ? ++event->recorded : event->recorded;
  pthread_mutex_unlock(&event->lock);
  return gen;
}

API CUresult cuEventCreate(CUevent *event, unsigned flags) {
  (void)flags;
  if (!event) return CUDA_ERROR_INVALID_VALUE;
  struct CUevent_st *made = calloc(1, sizeof(*made));
  if (!made) return CUDA_ERROR_OUT_OF_MEMORY;
  pthread_mutex_init(&made->lock, NULL);
  pthread_cond_init(&made->done, NULL);
  *event = made;
  return CUDA_SUCCESS;
}

API CUresult cuEventDestroy_v2(CUevent event) {
  free(event);
  return CUDA_SUCCESS;
}

API CUresult cuEventDestroy(CUevent event) { return cuEventDestroy_v2(event); }

static CUresult record(CUevent event, struct CUstream_st *s) {
  if (!event) return CUDA_ERROR_INVALID_HANDLE;
  uint64_t gen = streamCapturing(s) ? 0 : eventRecorded(event, true);
  return streamPush(s, (struct op){.kind = OP_RECORD, .event = event, .gen = gen});
}

API CUresult cuEventRecord(CUevent event, CUstream stream) {
  return record(event, streamResolve(stream, false));
}

API CUresult cuEventRecord_ptsz(CUevent event, CUstream stream) {
  return record(event, streamResolve(stream, true));
}

API CUresult cuEventSynchronize(CUevent event) {
  if (!event) return CUDA_ERROR_INVALID_HANDLE;
  eventWait(event, eventRecorded(event, false));
  return CUDA_SUCCESS;
}

API CUresult cuEventQuery(CUevent event) {
  if (!event) return CUDA_ERROR_INVALID_HANDLE;
  pthread_mutex_lock(&event->lock);
  bool done = event->completed >= event->recorded;
  pthread_mutex_unlock(&event->lock);
  return done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

static CUresult streamWait(struct CUstream_st *s, CUevent event) {
  if (!event) return CUDA_ERROR_INVALID_HANDLE;
  /* Inside a capture the record is a node of the same graph, so order already holds. */
  uint64_t gen = streamCapturing(s) ? 0 : eventRecorded(event, false);
  return streamPush(s, (struct op){.kind = OP_WAIT, .event = event, .gen = gen});
}

API CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
  (void)flags;
  return streamWait(streamResolve(stream, false), event);
}

API CUresult cuStreamWaitEvent_ptsz(CUstream stream, CUevent event, unsigned flags) {
  (void)flags;
  return streamWait(streamResolve(stream, true), event);
}
