/* One rank process: meet the others, run the steps, leave the ground truth behind. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "job.h"

volatile sig_atomic_t stopAsked;

static void onTerm(int signal) {
  (void)signal;
  stopAsked = 1;
}

static void handleSignals(void) {
  struct sigaction action = {.sa_handler = onTerm, .sa_flags = SA_RESTART};
  sigaction(SIGTERM, &action, NULL);
  sigaction(SIGINT, &action, NULL);
}

static void nap(void) { nanosleep(&(struct timespec){0, 5000000}, NULL); }

static void waitForFile(const char *path) {
  while (access(path, F_OK)) {
    if (stopAsked) {
      truthWrite("stopped");
      exit(0);
    }
    nap();
  }
}

static void setEnvironment(void) {
  char text[16];
  snprintf(text, sizeof(text), "%d", options.rank);
  setenv("RIG_RANK", text, 1);
  snprintf(text, sizeof(text), "%d", options.rank / options.ranksPerNode);
  setenv("RIG_NODE", text, 1);
}

/* Renamed into place, so a reader never sees half an id. */
static void publishId(const ncclUniqueId *id) {
  char temporary[4096];
  snprintf(temporary, sizeof(temporary), "%s.tmp", options.uidFile);
  FILE *out = fopen(temporary, "wb");
  if (!out || fwrite(id, sizeof(*id), 1, out) != 1 || fclose(out)) die("cannot write %s", temporary);
  if (rename(temporary, options.uidFile)) die("cannot write %s", options.uidFile);
}

static ncclUniqueId meetingPoint(void) {
  ncclUniqueId id;
  if (options.rank == 0) {
    if (CALL(ncclGetUniqueId, &id)) die("ncclGetUniqueId failed");
    if (options.uidFile) publishId(&id);
    return id;
  }
  waitForFile(options.uidFile);
  FILE *in = fopen(options.uidFile, "rb");
  if (!in || fread(&id, sizeof(id), 1, in) != 1) die("cannot read %s", options.uidFile);
  fclose(in);
  return id;
}

static void remember(const char *name, ncclComm_t comm) {
  struct commTruth *c = &truth.comms[truth.commCount++];
  c->name = name;
  c->comm = comm;
  c->hash = rigNcclHash(comm);
  ncclCommUserRank(comm, &c->rank);
  ncclCommCount(comm, &c->ranks);
}

static ncclComm_t splitOff(ncclComm_t world, const char *name, int color) {
  ncclComm_t made = NULL;
  if (CALL(ncclCommSplit, world, color, options.rank, &made, NULL)) die("ncclCommSplit failed");
  if (made) remember(name, made);
  return made;
}

static void useDevice(void) {
  CUcontext context;
  int device = options.rank % options.ranksPerNode;
  if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, device) || cuCtxSetCurrent(context)) {
    die("no device %d", device);
  }
}

int main(int argc, char **argv) {
  ncclComm_t world = NULL, dp = NULL, pair = NULL;
  optionsParse(argc, argv);
  handleSignals();
  setEnvironment();
  faultsInit();
  truthInit();
  truthStartThread();
  useDevice();
  if (options.startFile && !options.initFirst) waitForFile(options.startFile);
  ncclUniqueId id = meetingPoint();
  if (CALL(ncclCommInitRank, &world, options.ranks, id, options.rank)) {
    truthWrite("error");
    die("ncclCommInitRank failed: %s", ncclGetLastError(NULL));
  }
  remember("world", world);
  if (options.dpGroups > 0) dp = splitOff(world, "dp", options.rank % options.dpGroups);
  if (options.pipeline) {
    bool alone = options.rank == options.ranks - 1 && !(options.rank & 1);
    pair = splitOff(world, "pipeline", alone ? NCCL_SPLIT_NOCOLOR : options.rank / 2);
  }
  truthWrite("ready");
  if (options.startFile && options.initFirst) waitForFile(options.startFile);
  truth.beginNs = nowNs();
  truth.state = "running";
  runSteps(world, dp, pair);
  if (pair) CALL(ncclCommDestroy, pair);
  if (dp) CALL(ncclCommDestroy, dp);
  CALL(ncclCommDestroy, world);
  truthWrite(stopAsked ? "stopped" : "done");
  return 0;
}
