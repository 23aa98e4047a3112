/* Shared memory, its life, and the only way anything here waits: a futex with a limit.
 *
 * All zeroes is a valid initial state and every rank sets the same size, so there is no race about
 * who initialises. The last rank to attach removes the name; a job that dies before that leaves a
 * file that the launcher removes by its prefix (RIG_SHM_PREFIX). */
#include "segment.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "rigtopo.h"

enum { PAGE = 4096, POLL_MS = 500 };

static size_t bounded(size_t value, size_t low, size_t high) {
  value = value < low ? low : value > high ? high : value;
  return value / PAGE * PAGE;
}

static size_t roundUp(size_t value) { return (value + PAGE - 1) / PAGE * PAGE; }

uint64_t segTimeoutNs(void) {
  return (uint64_t)rigEnvInt("RIG_NCCL_TIMEOUT_MS", 120000) * 1000000u;
}

static void layout(struct segment *seg, size_t *peersAt, size_t *channelsAt, size_t *slotsAt,
                   size_t *chunksAt) {
  size_t n = (size_t)seg->nranks;
  seg->slotBytes = bounded(((size_t)32 << 20) / (2 * n), 4 * PAGE, 64 * PAGE);
  seg->chunkBytes = bounded(((size_t)64 << 20) / (n * n * CHANNEL_DEPTH), PAGE, 16 * PAGE);
  *peersAt = PAGE;
  *channelsAt = *peersAt + roundUp(n * sizeof(struct shmPeer));
  *slotsAt = *channelsAt + roundUp(n * n * sizeof(struct shmChannel));
  *chunksAt = *slotsAt + 2 * n * seg->slotBytes;
  seg->bytes = *chunksAt + n * n * CHANNEL_DEPTH * seg->chunkBytes;
}

struct shmChannel *segChannel(struct segment *seg, int from, int to) {
  return &seg->channels[(size_t)from * (size_t)seg->nranks + (size_t)to];
}

char *segChunk(struct segment *seg, int from, int to, uint32_t index) {
  size_t channel = (size_t)from * (size_t)seg->nranks + (size_t)to;
  return seg->chunks + (channel * CHANNEL_DEPTH + index % CHANNEL_DEPTH) * seg->chunkBytes;
}

char *segSlot(struct segment *seg, int rank, uint64_t parity) {
  return seg->slots + ((size_t)rank * 2 + (parity & 1)) * seg->slotBytes;
}

/* Field 22 of /proc/PID/stat, counted behind the name, which may hold blanks and brackets. */
static uint64_t processStart(int pid, char *state) {
  char path[64], text[1024];
  snprintf(path, sizeof(path), "/proc/%d/stat", pid);
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  ssize_t len = read(fd, text, sizeof(text) - 1);
  close(fd);
  if (len <= 0) return 0;
  text[len] = 0;
  char *at = strrchr(text, ')');
  if (!at || !at[1]) return 0;
  *state = at[2];
  for (int field = 2; at && field < 22; field++) at = strchr(at + 1, ' ');
  return at ? strtoull(at, NULL, 10) : 0;
}

/* A killed child stays a zombie until its parent reaps it, so kill(pid, 0) would not tell. */
static bool peerGone(const struct shmPeer *peer) {
  char state = 'X';
  if (!peer->pid) return false;
  uint64_t start = processStart(peer->pid, &state);
  return start != peer->startTime || state == 'Z' || state == 'X';
}

static bool deadPeersMatter(void) {
  const char *text = getenv("RIG_DEAD_PEER");
  return !(text && !strcmp(text, "ignore"));
}

static ncclResult_t checkPeers(struct rigComm *rc) {
  struct segment *seg = rc->seg;
  if (atomic_load(&rc->abort)) return ncclInvalidUsage;
  if (atomic_load(&seg->head->lost)) return ncclRemoteError;
  /* One neighbour a look, a different one each time: cheap, and together the waiters see all. */
  static _Atomic unsigned turn;
  int next = (seg->rank + 1 + (int)(turn++ % (unsigned)(seg->nranks ? seg->nranks : 1))) % seg->nranks;
  for (int i = 0; i < 2; i++) {
    int rank = i ? next : (seg->rank + 1) % seg->nranks;
    if (rank == seg->rank || !deadPeersMatter() || !peerGone(&seg->peers[rank])) continue;
    rigWarn("rank %d of communicator %016lx is gone", rank, (unsigned long)rc->comm->commHash);
    atomic_store(&seg->head->lost, 1 + (uint32_t)rank);
    segInterrupt(rc);
    return ncclRemoteError;
  }
  return ncclSuccess;
}

static long futex(_Atomic uint32_t *address, int op, uint32_t value, const struct timespec *limit) {
  return syscall(SYS_futex, address, op, value, limit, NULL, 0);
}

void segWake(_Atomic uint32_t *address, int count) {
  futex(address, FUTEX_WAKE, (uint32_t)count, NULL);
}

ncclResult_t segWait(struct rigComm *rc, _Atomic uint32_t *address, uint32_t expected,
                     uint64_t untilNs) {
  uint64_t span = (uint64_t)POLL_MS * 1000000u, now = nowNs();
  bool polled = true;
  if (atomic_load(&rc->abort)) return ncclInvalidUsage;
  if (untilNs && untilNs < now + span) {
    span = untilNs > now ? untilNs - now : 0;
    polled = false;
  }
  struct timespec limit = {(time_t)(span / 1000000000u), (long)(span % 1000000000u)};
  long rc_ = futex(address, FUTEX_WAIT, expected, &limit);
  if (rc_ < 0 && errno == ETIMEDOUT && polled) return checkPeers(rc);
  if (atomic_load(&rc->abort)) return ncclInvalidUsage;
  return atomic_load(&rc->seg->head->lost) ? ncclRemoteError : ncclSuccess;
}

/* Makes every waiter of the communicator look at its state again. */
void segInterrupt(struct rigComm *rc) {
  struct segment *seg = rc->seg;
  if (!seg) return;
  for (int i = 0; i < seg->nranks; i++) segWake(&seg->peers[i].bell, INT_MAX);
  segWake(&seg->head->work.generation, INT_MAX);
  segWake(&seg->head->host.generation, INT_MAX);
  segWake(&seg->head->ready, INT_MAX);
}

static ncclResult_t waitChange(struct rigComm *rc, _Atomic uint32_t *address, uint32_t from) {
  uint64_t limit = nowNs() + segTimeoutNs();
  while (atomic_load(address) == from) {
    ncclResult_t result = segWait(rc, address, from, 0);
    if (result && atomic_load(address) == from) return result;
    if (nowNs() > limit) {
      rigWarn("gave up waiting for the other ranks");
      return ncclRemoteError;
    }
  }
  return ncclSuccess;
}

ncclResult_t segBarrier(struct rigComm *rc, struct barrier *barrier) {
  uint32_t generation = atomic_load(&barrier->generation);
  if (atomic_fetch_add(&barrier->arrived, 1) + 1 == (uint32_t)rc->seg->nranks) {
    atomic_store(&barrier->arrived, 0);
    atomic_fetch_add(&barrier->generation, 1);
    segWake(&barrier->generation, INT_MAX);
    return ncclSuccess;
  }
  return waitChange(rc, &barrier->generation, generation);
}

static void segName(const struct rigComm *rc, char *name, size_t size) {
  const char *prefix = getenv("RIG_SHM_PREFIX");
  snprintf(name, size, "/%s-%016lx", prefix && *prefix ? prefix : "rig", (unsigned long)rc->key);
}

static void describeSelf(struct rigComm *rc, struct shmPeer *self) {
  char state;
  self->startTime = processStart(getpid(), &state);
  self->globalRank = rigEnvInt("RIG_RANK", rc->seg->rank);
  self->node = rigNode();
  self->cudaDev = rc->comm->cudaDev;
  self->nvmlDev = rc->comm->nvmlDev;
  self->busId = rc->comm->busId;
  self->pid = getpid(); /* last: nonzero says that the rest is there */
}

static ncclResult_t mapSegment(struct rigComm *rc, struct segment *seg, const char *name) {
  size_t peersAt, channelsAt, slotsAt, chunksAt;
  layout(seg, &peersAt, &channelsAt, &slotsAt, &chunksAt);
  int fd = shm_open(name, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0 || ftruncate(fd, (off_t)seg->bytes)) {
    rigWarn("shared memory %s: %s", name, strerror(errno));
    if (fd >= 0) close(fd);
    return ncclSystemError;
  }
  char *base = mmap(NULL, seg->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (base == MAP_FAILED) return ncclSystemError;
  seg->head = (struct shmHead *)base;
  seg->peers = (struct shmPeer *)(base + peersAt);
  seg->channels = (struct shmChannel *)(base + channelsAt);
  seg->slots = base + slotsAt;
  seg->chunks = base + chunksAt;
  (void)rc;
  return ncclSuccess;
}

ncclResult_t segAttach(struct rigComm *rc, int nranks, int rank) {
  char name[NAME_MAX];
  struct segment *seg = calloc(1, sizeof(*seg));
  if (!seg) return ncclSystemError;
  seg->nranks = nranks;
  seg->rank = rank;
  segName(rc, name, sizeof(name));
  ncclResult_t result = mapSegment(rc, seg, name);
  if (result) {
    free(seg);
    return result;
  }
  rc->seg = seg;
  describeSelf(rc, &seg->peers[rank]);
  if (atomic_fetch_add(&seg->head->attached, 1) + 1 == (uint32_t)nranks) {
    shm_unlink(name);
    atomic_store(&seg->head->ready, 1);
    segWake(&seg->head->ready, INT_MAX);
    return ncclSuccess;
  }
  result = waitChange(rc, &seg->head->ready, 0);
  if (result) shm_unlink(name);
  return result;
}

void segDetach(struct segment *seg) {
  if (!seg) return;
  if (seg->head) munmap(seg->head, seg->bytes);
  free(seg);
}
