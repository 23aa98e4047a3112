/* The way to CUDA: no link-time dependency, but dlopen and the driver's own lookup, as NCCL does.
 * Without a driver each stream pointer gets a thread here. */
#include <dlfcn.h>
#include <signal.h>
#include <stdlib.h>

#include "exec.h"
#include "rigtopo.h"

struct driver {
  int (*launch)(ncclStream_t, void (*)(void *), void *);
  int (*capturing)(ncclStream_t, int *);
  int (*getDevice)(int *);
  int (*retain)(void **, int);
  int (*setContext)(void *);
  int (*busId)(char *, int, int);
  void (*name)(const char *); /* the stand-in's own: of the kernel to be launched next */
};

static struct driver cu;
static pthread_once_t once = PTHREAD_ONCE_INIT;

typedef int (*lookup)(const char *, void **, int, uint64_t, int *);

static void *find(lookup get, const char *name) {
  void *fn = NULL;
  int status = 0;
  return get(name, &fn, 12000, 0, &status) ? NULL : fn;
}

static void load(void) {
  if (rigEnvInt("RIG_NO_CUDA", 0)) return;
  void *lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  lookup get = lib ? (lookup)dlsym(lib, "cuGetProcAddress_v2") : NULL;
  if (!get) return;
  cu.capturing = (int (*)(ncclStream_t, int *))find(get, "cuStreamIsCapturing");
  cu.getDevice = (int (*)(int *))find(get, "cuCtxGetDevice");
  cu.retain = (int (*)(void **, int))find(get, "cuDevicePrimaryCtxRetain");
  cu.setContext = (int (*)(void *))find(get, "cuCtxSetCurrent");
  cu.busId = (int (*)(char *, int, int))find(get, "cuDeviceGetPCIBusId");
  cu.name = (void (*)(const char *))find(get, "rigKernelName");
  cu.launch =
      (int (*)(ncclStream_t, void (*)(void *), void *))find(get, "cuLaunchHostFunc");
}

static bool haveDriver(void) {
  pthread_once(&once, load);
  return cu.launch != NULL;
}

int driverDevice(void) {
  int device = 0;
  if (haveDriver() && cu.getDevice && cu.getDevice(&device)) device = 0;
  return device;
}

void driverSetDevice(int device) {
  void *context = NULL;
  if (haveDriver() && cu.retain && cu.setContext && !cu.retain(&context, device)) {
    cu.setContext(context);
  }
}

/* CUDA_VISIBLE_DEVICES renumbers; the bus id tells which GPU of the host it really is. */
int driverPhysicalGpu(int device) {
  char text[32];
  unsigned domain, bus;
  if (!haveDriver() || !cu.busId || cu.busId(text, sizeof(text), device)) return device;
  if (sscanf(text, "%x:%x", &domain, &bus) != 2) return device;
  for (int gpu = 0; gpu < RIG_MAX_GPUS; gpu++) {
    if (rigGpuBus(gpu) == bus) return gpu;
  }
  return device;
}

bool driverCapturing(ncclStream_t stream) {
  int status = 0;
  if (!haveDriver() || !cu.capturing) return false;
  return cu.capturing(stream, &status) == 0 && status != 0;
}

struct item {
  void (*fn)(void *);
  void *arg;
  struct item *next;
};

static struct ownStream {
  ncclStream_t stream;
  bool used;
  struct item *first, **last;
  pthread_mutex_t lock;
  pthread_cond_t filled;
} own[64];
static pthread_mutex_t ownLock = PTHREAD_MUTEX_INITIALIZER;

static void *ownWorker(void *arg) {
  struct ownStream *s = arg;
  for (;;) {
    pthread_mutex_lock(&s->lock);
    while (!s->first) pthread_cond_wait(&s->filled, &s->lock);
    struct item *item = s->first;
    s->first = item->next;
    if (!s->first) s->last = &s->first;
    pthread_mutex_unlock(&s->lock);
    item->fn(item->arg);
    free(item);
  }
  return NULL;
}

static bool startOwn(struct ownStream *s) {
  pthread_t thread;
  sigset_t all, old;
  pthread_mutex_init(&s->lock, NULL);
  pthread_cond_init(&s->filled, NULL);
  s->last = &s->first;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  int failed = pthread_create(&thread, NULL, ownWorker, s);
  pthread_sigmask(SIG_SETMASK, &old, NULL);
  if (!failed) pthread_detach(thread);
  s->used = !failed;
  return !failed;
}

static struct ownStream *ownFor(ncclStream_t stream) {
  struct ownStream *found = NULL;
  pthread_mutex_lock(&ownLock);
  for (size_t i = 0; i < sizeof(own) / sizeof(*own) && !found; i++) {
    if (own[i].used && own[i].stream == stream) found = &own[i];
    if (own[i].used) continue;
    own[i].stream = stream;
    if (startOwn(&own[i])) found = &own[i];
    break;
  }
  pthread_mutex_unlock(&ownLock);
  return found;
}

static ncclResult_t launchOwn(ncclStream_t stream, void (*fn)(void *), void *arg) {
  struct ownStream *s = ownFor(stream);
  struct item *item = s ? malloc(sizeof(*item)) : NULL;
  if (!item) return ncclSystemError;
  *item = (struct item){fn, arg, NULL};
  pthread_mutex_lock(&s->lock);
  *s->last = item;
  s->last = &item->next;
  pthread_cond_signal(&s->filled);
  pthread_mutex_unlock(&s->lock);
  return ncclSuccess;
}

ncclResult_t driverLaunch(ncclStream_t stream, void (*fn)(void *), void *arg) {
  if (!haveDriver()) return launchOwn(stream, fn, arg);
  return cu.launch(stream, fn, arg) ? ncclUnhandledCudaError : ncclSuccess;
}

void driverName(const char *name) {
  if (haveDriver() && cu.name) cu.name(name);
}
