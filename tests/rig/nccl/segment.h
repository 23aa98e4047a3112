/* The shared memory of one communicator: who is in it, barriers, slots and pair channels. */
#ifndef RIG_NCCL_SEGMENT_H
#define RIG_NCCL_SEGMENT_H

#include "comm.h"

struct barrier {
  _Atomic uint32_t arrived, generation; /* generation is the futex */
};

struct shmHead {
  _Atomic uint32_t attached, ready; /* ready is a futex */
  _Atomic uint32_t lost;            /* 1 + the first rank found dead */
  struct barrier host, work;
};

struct shmPeer {
  int32_t pid, globalRank, node, cudaDev, nvmlDev, color, key;
  int64_t busId;
  uint64_t startTime;
  /* The doorbell: senders and receivers ring the other side; wakeAt spares it useless wake-ups. */
  _Atomic uint32_t bell, sleeping, wakeAt;
} __attribute__((aligned(128)));

enum { CHANNEL_DEPTH = 2 };

/* From one rank to one other: a ring of chunks, written by the sender, freed by the receiver. */
struct shmChannel {
  _Atomic uint32_t head, tail, senderWaits;
  uint32_t length[CHANNEL_DEPTH];
  uint64_t total[CHANNEL_DEPTH];
  uint64_t leftNs[CHANNEL_DEPTH]; /* when it leaves the sender: now, or later with a slow one */
} __attribute__((aligned(64)));

struct segment {
  struct shmHead *head;
  struct shmPeer *peers;
  struct shmChannel *channels;
  char *slots, *chunks;
  size_t slotBytes, chunkBytes, bytes;
  int nranks, rank;
};

struct shmChannel *segChannel(struct segment *seg, int from, int to);
char *segChunk(struct segment *seg, int from, int to, uint32_t index);
char *segSlot(struct segment *seg, int rank, uint64_t parity);

/* Blocks until all ranks of the communicator are attached. */
ncclResult_t segAttach(struct rigComm *rc, int nranks, int rank);
void segDetach(struct segment *seg);

/* Sleeps until *address differs from expected, somebody wakes it, or untilNs (0: a short while).
 * Fails when the communicator is aborted or a peer is gone. */
ncclResult_t segWait(struct rigComm *rc, _Atomic uint32_t *address, uint32_t expected,
                     uint64_t untilNs);
void segWake(_Atomic uint32_t *address, int count);
ncclResult_t segBarrier(struct rigComm *rc, struct barrier *barrier);
void segInterrupt(struct rigComm *rc);
uint64_t segTimeoutNs(void);

/* fault.c: delays in nanoseconds, by global rank. */
uint64_t faultSender(int rank, uint64_t step);
uint64_t faultReceiver(int rank, uint64_t step);
uint64_t faultPath(int from, int to, uint64_t step);

#endif
