/* libnvidia-ml.so.1: what monitoring asks for, answered from the state file. */
#include <pthread.h>
#include <string.h>
#include <time.h>

#include "state.h"

typedef int nvmlReturn_t;
typedef struct nvmlDevice_st *nvmlDevice_t;

enum {
  NVML_SUCCESS = 0,
  NVML_ERROR_UNINITIALIZED = 1,
  NVML_ERROR_INVALID_ARGUMENT = 2,
  NVML_ERROR_NOT_SUPPORTED = 3,
  NVML_ERROR_NOT_FOUND = 6,
  NVML_ERROR_INSUFFICIENT_SIZE = 7,
  NVML_ERROR_GPU_IS_LOST = 15,
  NVML_ERROR_UNKNOWN = 999,
};

typedef struct {
  char busIdLegacy[16];
  unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
  char busId[32];
} nvmlPciInfo_t;
_Static_assert(sizeof(nvmlPciInfo_t) == 68, "nvmlPciInfo_t ABI");

typedef struct {
  unsigned long long total, free, used;
} nvmlMemory_t;

typedef struct {
  unsigned version;
  unsigned long long total, reserved, free, used;
} nvmlMemory_v2_t;
_Static_assert(sizeof(nvmlMemory_v2_t) == 40, "nvmlMemory_v2_t ABI");

typedef struct {
  unsigned gpu, memory;
} nvmlUtilization_t;

typedef struct {
  unsigned pid;
  unsigned long long usedGpuMemory;
  unsigned gpuInstanceId, computeInstanceId;
} nvmlProcessInfo_t;
_Static_assert(sizeof(nvmlProcessInfo_t) == 24, "nvmlProcessInfo_t ABI");

typedef struct {
  unsigned pid;
  unsigned long long timeStamp;
  unsigned smUtil, memUtil, encUtil, decUtil;
} nvmlProcessUtilizationSample_t;
_Static_assert(sizeof(nvmlProcessUtilizationSample_t) == 32, "utilization sample ABI");

#define API __attribute__((visibility("default")))

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int users;
#define MIG_MAX 7
static char handles[RIG_MAX_GPUS]; /* a handle is an address in here */
static char instances[RIG_MAX_GPUS * MIG_MAX]; /* or, of a MIG instance, in here */

static nvmlReturn_t enter(const char *function) {
  stateRefresh();
  int failure = stateFailure(function);
  if (failure) return failure;
  return users ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
}

static nvmlReturn_t enterDevice(const char *function, nvmlDevice_t device, int *gpu) {
  nvmlReturn_t result = enter(function);
  long index = (const char *)device - handles;
  *gpu = (int)index;
  if (result) return result;
  if (index < 0 || index >= stateCount()) return NVML_ERROR_INVALID_ARGUMENT;
  return stateNumber(*gpu, "lost", 0) ? NVML_ERROR_GPU_IS_LOST : NVML_SUCCESS;
}

/* An exported function that checks everything, then runs `body` under the lock with `result` 0. */
#define QUERY(name, params, body)                                                                \
  API nvmlReturn_t name params {                                                                 \
    pthread_mutex_lock(&lock);                                                                   \
    nvmlReturn_t result = enter(#name);                                                          \
    if (!result) body;                                                                           \
    pthread_mutex_unlock(&lock);                                                                 \
    return result;                                                                               \
  }

#define UNWRAP(...) __VA_ARGS__
#define DEVICE_QUERY(name, params, body)                                                         \
  API nvmlReturn_t name(nvmlDevice_t handle, UNWRAP params) {                                    \
    int gpu;                                                                                     \
    pthread_mutex_lock(&lock);                                                                   \
    nvmlReturn_t result = enterDevice(#name, handle, &gpu);                                      \
    if (!result) body;                                                                           \
    pthread_mutex_unlock(&lock);                                                                 \
    return result;                                                                               \
  }

#define NUMBER_QUERY(name, type, key, fallback)                                                  \
  DEVICE_QUERY(name, (type * out), {                                                             \
    if (out) {                                                                                   \
      *out = (type)stateNumber(gpu, key, fallback);                                              \
    } else {                                                                                     \
      result = NVML_ERROR_INVALID_ARGUMENT;                                                      \
    }                                                                                            \
  })

static nvmlReturn_t copyText(char *out, unsigned size, const char *text) {
  if (!out) return NVML_ERROR_INVALID_ARGUMENT;
  if (size <= strlen(text)) return NVML_ERROR_INSUFFICIENT_SIZE;
  strcpy(out, text);
  return NVML_SUCCESS;
}

static nvmlReturn_t init(const char *function) {
  pthread_mutex_lock(&lock);
  stateRefresh();
  nvmlReturn_t result = stateFailure(function);
  if (!result) users++;
  pthread_mutex_unlock(&lock);
  return result;
}

API nvmlReturn_t nvmlInit_v2(void) { return init("nvmlInit_v2"); }

API nvmlReturn_t nvmlInitWithFlags(unsigned flags) {
  (void)flags;
  return init("nvmlInitWithFlags");
}

QUERY(nvmlShutdown, (void), users--)

API const char *nvmlErrorString(nvmlReturn_t result) {
  switch (result) {
    case NVML_SUCCESS: return "The operation was successful";
    case NVML_ERROR_UNINITIALIZED: return "NVML was not first initialized with nvmlInit()";
    case NVML_ERROR_INVALID_ARGUMENT: return "A supplied argument is invalid";
    case NVML_ERROR_NOT_SUPPORTED: return "The requested operation is not available";
    case NVML_ERROR_NOT_FOUND: return "A query to find an object was unsuccessful";
    case NVML_ERROR_INSUFFICIENT_SIZE: return "An input argument is not large enough";
    case NVML_ERROR_GPU_IS_LOST: return "The GPU has fallen off the bus";
    default: return "Unknown Error";
  }
}

QUERY(nvmlSystemGetDriverVersion, (char *out, unsigned size),
      result = copyText(out, size, "570.00.rig"))
QUERY(nvmlSystemGetNVMLVersion, (char *out, unsigned size),
      result = copyText(out, size, "12.570.00.rig"))
QUERY(nvmlSystemGetCudaDriverVersion, (int *out), *out = 12080)
QUERY(nvmlSystemGetCudaDriverVersion_v2, (int *out), *out = 12080)
QUERY(nvmlDeviceGetCount_v2, (unsigned *out), *out = (unsigned)stateCount())

static nvmlReturn_t handleOf(int gpu, nvmlDevice_t *out) {
  if (!out || gpu < 0 || gpu >= stateCount()) return NVML_ERROR_INVALID_ARGUMENT;
  *out = (nvmlDevice_t)(void *)&handles[gpu];
  return stateNumber(gpu, "lost", 0) ? NVML_ERROR_GPU_IS_LOST : NVML_SUCCESS;
}

QUERY(nvmlDeviceGetHandleByIndex_v2, (unsigned index, nvmlDevice_t *out),
      result = handleOf((int)index, out))

/* Both forms are taken: "0000:0a:00.0" and NVML's own "00000000:0A:00.0". */
static nvmlReturn_t byBusId(const char *text, nvmlDevice_t *out) {
  unsigned domain, bus, device = 0;
  if (!text || sscanf(text, "%x:%x:%x", &domain, &bus, &device) < 2) {
    return NVML_ERROR_INVALID_ARGUMENT;
  }
  for (int gpu = 0; gpu < stateCount(); gpu++) {
    if (!domain && !device && rigGpuBus(gpu) == bus) return handleOf(gpu, out);
  }
  return NVML_ERROR_NOT_FOUND;
}

static nvmlReturn_t byUuid(const char *text, nvmlDevice_t *out) {
  char uuid[64];
  for (int gpu = 0; text && gpu < stateCount(); gpu++) {
    rigGpuUuid(gpu, uuid, sizeof(uuid));
    if (!strcmp(uuid, text)) return handleOf(gpu, out);
  }
  return text ? NVML_ERROR_NOT_FOUND : NVML_ERROR_INVALID_ARGUMENT;
}

QUERY(nvmlDeviceGetHandleByPciBusId_v2, (const char *text, nvmlDevice_t *out),
      result = byBusId(text, out))
QUERY(nvmlDeviceGetHandleByUUID, (const char *text, nvmlDevice_t *out), result = byUuid(text, out))

static nvmlReturn_t nameOf(int gpu, char *out, unsigned size) {
  const char *name = stateText(gpu, "name");
  return copyText(out, size, name ? name : "Rig GPU");
}

static nvmlReturn_t uuidOf(int gpu, char *out, unsigned size) {
  char uuid[64];
  rigGpuUuid(gpu, uuid, sizeof(uuid));
  return copyText(out, size, uuid);
}

DEVICE_QUERY(nvmlDeviceGetName, (char *out, unsigned size), result = nameOf(gpu, out, size))
static nvmlReturn_t instanceUuid(long instance, char *out, unsigned size) {
  char uuid[64];
  snprintf(uuid, sizeof(uuid), "MIG-%08lx-0000-0000-0000-000000000000", instance);
  return copyText(out, size, uuid);
}

API nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t handle, char *out, unsigned size) {
  int gpu;
  long instance = (const char *)handle - instances;
  int mig = instance >= 0 && instance < (long)sizeof(instances);
  pthread_mutex_lock(&lock);
  nvmlReturn_t result = mig ? enter(__func__) : enterDevice(__func__, handle, &gpu);
  if (!result) result = mig ? instanceUuid(instance, out, size) : uuidOf(gpu, out, size);
  pthread_mutex_unlock(&lock);
  return result;
}

DEVICE_QUERY(nvmlDeviceGetIndex, (unsigned *out), *out = (unsigned)gpu)
DEVICE_QUERY(nvmlDeviceGetMinorNumber, (unsigned *out), *out = (unsigned)gpu)

DEVICE_QUERY(nvmlDeviceGetPciInfo_v3, (nvmlPciInfo_t * out), {
  memset(out, 0, sizeof(*out));
  out->bus = rigGpuBus(gpu);
  out->pciDeviceId = 0x233010de;
  snprintf(out->busIdLegacy, sizeof(out->busIdLegacy), "0000:%02X:00.0", out->bus);
  snprintf(out->busId, sizeof(out->busId), "00000000:%02X:00.0", out->bus);
})

static void memoryOf(int gpu, unsigned long long *total, unsigned long long *used) {
  *total = stateNumber(gpu, "memory_total", 80ull << 30);
  *used = stateNumber(gpu, "memory_used", 1ull << 30);
  if (*used > *total) *used = *total;
}

DEVICE_QUERY(nvmlDeviceGetMemoryInfo, (nvmlMemory_t * out), {
  memoryOf(gpu, &out->total, &out->used);
  out->free = out->total - out->used;
})

DEVICE_QUERY(nvmlDeviceGetMemoryInfo_v2, (nvmlMemory_v2_t * out), {
  memoryOf(gpu, &out->total, &out->used);
  out->reserved = 0;
  out->free = out->total - out->used;
})

DEVICE_QUERY(nvmlDeviceGetUtilizationRates, (nvmlUtilization_t * out), {
  out->gpu = (unsigned)stateNumber(gpu, "utilization", 0);
  out->memory = (unsigned)stateNumber(gpu, "memory_utilization", 0);
})

DEVICE_QUERY(nvmlDeviceGetTemperature, (unsigned sensor, unsigned *out), {
  (void)sensor;
  *out = (unsigned)stateNumber(gpu, "temperature", 45);
})

NUMBER_QUERY(nvmlDeviceGetPowerUsage, unsigned, "power_mw", 100000)
NUMBER_QUERY(nvmlDeviceGetEnforcedPowerLimit, unsigned, "power_limit_mw", 700000)

/* Without a given value: the power since the machine started, so that it only grows. */
DEVICE_QUERY(nvmlDeviceGetTotalEnergyConsumption, (unsigned long long *out), {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  unsigned long long ms =
      (unsigned long long)now.tv_sec * 1000u + (unsigned long long)now.tv_nsec / 1000000u;
  *out = stateNumber(gpu, "energy_mj", stateNumber(gpu, "power_mw", 100000) * ms / 1000u);
})

/* Clock types: 0 graphics, 1 SM, 2 memory, 3 video. */
DEVICE_QUERY(nvmlDeviceGetClockInfo, (unsigned type, unsigned *out), {
  *out = (unsigned)(type == 2 ? stateNumber(gpu, "mem_clock_mhz", 2619)
                              : stateNumber(gpu, "sm_clock_mhz", 1980));
})

DEVICE_QUERY(nvmlDeviceGetMaxClockInfo, (unsigned type, unsigned *out), {
  *out = (unsigned)(type == 2 ? 2619 : stateNumber(gpu, "sm_clock_max_mhz", 1980));
})

NUMBER_QUERY(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, "throttle", 0)
NUMBER_QUERY(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, "throttle", 0)
NUMBER_QUERY(nvmlDeviceGetPersistenceMode, unsigned, "persistence", 1)

DEVICE_QUERY(nvmlDeviceGetMigMode, (unsigned *current, unsigned *pending), {
  *current = *pending = stateNumber(gpu, "mig", 0) > 0;
})

DEVICE_QUERY(nvmlDeviceGetMaxMigDeviceCount, (unsigned *out), *out = MIG_MAX)

/* The first instance has place 1: not every place is taken. */
DEVICE_QUERY(nvmlDeviceGetMigDeviceHandleByIndex, (unsigned place, nvmlDevice_t *out), {
  if (place >= 1 && place <= stateNumber(gpu, "mig", 0) && place < MIG_MAX) {
    *out = (nvmlDevice_t)(void *)&instances[gpu * MIG_MAX + (int)place];
  } else {
    result = NVML_ERROR_NOT_FOUND;
  }
})

/* Next "pid:bytes" of a comma-separated list; 0 when there is none. */
static unsigned nextProcess(const char **list, unsigned long long *bytes) {
  char *end;
  if (!*list || !**list) return 0;
  unsigned pid = (unsigned)strtoul(*list, &end, 10);
  *bytes = *end == ':' ? strtoull(end + 1, &end, 0) : 0;
  *list = *end == ',' ? end + 1 : NULL;
  return pid;
}

static nvmlReturn_t processesOf(int gpu, unsigned *count, nvmlProcessInfo_t *out) {
  unsigned long long bytes;
  unsigned room = *count, found = 0, pid;
  const char *list = stateText(gpu, "pid");
  while ((pid = nextProcess(&list, &bytes))) {
    if (out && found < room) out[found] = (nvmlProcessInfo_t){pid, bytes, ~0u, ~0u};
    found++;
  }
  *count = found;
  return found > room || (found && !out) ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

DEVICE_QUERY(nvmlDeviceGetComputeRunningProcesses_v2, (unsigned *count, nvmlProcessInfo_t *out),
             result = processesOf(gpu, count, out))
DEVICE_QUERY(nvmlDeviceGetComputeRunningProcesses_v3, (unsigned *count, nvmlProcessInfo_t *out),
             result = processesOf(gpu, count, out))

static nvmlReturn_t samplesOf(int gpu, nvmlProcessUtilizationSample_t *out, unsigned *count,
                              unsigned long long since) {
  struct timespec now;
  unsigned long long bytes;
  unsigned room = *count, found = 0, pid;
  const char *list = stateText(gpu, "pid");
  clock_gettime(CLOCK_REALTIME, &now);
  unsigned long long us =
      (unsigned long long)now.tv_sec * 1000000u + (unsigned long long)now.tv_nsec / 1000u;
  while (us > since && (pid = nextProcess(&list, &bytes))) {
    if (out && found < room) {
      out[found] = (nvmlProcessUtilizationSample_t){
          pid, us, (unsigned)stateNumber(gpu, "utilization", 0),
          (unsigned)stateNumber(gpu, "memory_utilization", 0), 0, 0};
    }
    found++;
  }
  *count = found;
  if (!found) return NVML_ERROR_NOT_FOUND; /* no sample newer than `since` */
  return found > room || !out ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

DEVICE_QUERY(nvmlDeviceGetProcessUtilization,
             (nvmlProcessUtilizationSample_t * out, unsigned *count, unsigned long long since),
             result = samplesOf(gpu, out, count, since))
