/* A stand-in for libcupti.so: what a library subscribes to, a test plays by calling what is below.
 * Names, numbers and offsets are those of CUPTI's public headers (CUDA 13.0): the members used here lie
 * at the same offsets in CUpti_ActivityKernel5 up to CUpti_ActivityKernel10. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define API __attribute__((visibility("default"), noinline))

enum { SUCCESS = 0, NO_MORE = 12, KIND_CONCURRENT_KERNEL = 10, RECORD_BYTES = 216 };

typedef void (*callback)(void *user, int domain, uint32_t function, const void *data);
typedef void (*wanted)(uint8_t **buffer, size_t *size, size_t *records);
typedef void (*finished)(void *context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid);

static callback onCall;
static void *user;
static wanted onWanted;
static finished onFinished;
static uint8_t *buffer;
static size_t room, filled, next;

API int cuptiSubscribe(void **subscriber, callback function, void *data) {
  onCall = function;
  user = data;
  *subscriber = &onCall;
  return SUCCESS;
}

API int cuptiActivityRegisterCallbacks(wanted request, finished done) {
  onWanted = request;
  onFinished = done;
  return SUCCESS;
}

API int cuptiActivityGetNextRecord(uint8_t *of, size_t valid, void **record) {
  if (next + RECORD_BYTES > valid) return NO_MORE;
  *record = of + next;
  next += RECORD_BYTES;
  return SUCCESS;
}

API int cuptiUnsubscribe(void *subscriber) { return SUCCESS; }
API int cuptiEnableCallback(uint32_t on, void *subscriber, int domain, uint32_t function) { return SUCCESS; }
API int cuptiActivityEnable(int kind) { return SUCCESS; }
API int cuptiActivityDisable(int kind) { return SUCCESS; }
API int cuptiActivityFlushAll(uint32_t flag) { return SUCCESS; }
API int cuptiActivityFlushPeriod(uint32_t milliseconds) { return SUCCESS; }
API int cuptiActivityGetNumDroppedRecords(void *context, uint32_t stream, size_t *dropped) {
  *dropped = 0;
  return SUCCESS;
}
API int cuptiGetVersion(uint32_t *version) {
  *version = 130000;
  return SUCCESS;
}
API int cuptiGetResultString(int result, const char **text) {
  *text = "played";
  return SUCCESS;
}

/* The head of CUpti_CallbackData. */
struct callbackData {
  int site; /* 0: the call begins, 1: it ends */
  const char *function;
  const void *parameters;
  void *result;
  const char *symbol;
  void *context;
  uint32_t contextNumber;
  uint64_t *correlationData;
  uint32_t correlation;
};

/* A call of the driver (domain 1) or runtime (2) with `inner`, what it calls, in the middle. */
API long playCall(int domain, uint32_t function, uint32_t correlation, long (*inner)(void)) {
  uint64_t data = 0;
  struct callbackData call = {.function = "f", .symbol = "s", .contextNumber = 1,
                              .correlationData = &data, .correlation = correlation};
  if (!onCall) return -1;
  onCall(user, domain, function, &call);
  if (inner) inner();
  call.site = 1;
  onCall(user, domain, function, &call);
  return 0;
}

/* -> how many kernels there is room for; 0: nobody wants any. */
API long playBuffer(void) {
  size_t records = 0;
  buffer = NULL;
  room = filled = 0;
  if (onWanted) onWanted(&buffer, &room, &records);
  return buffer ? (long)(room / RECORD_BYTES) : 0;
}

struct kernel {
  uint64_t start, end, node;
  const char *name;
  uint32_t correlation, device, stream, graph;
};

API long playKernel(const struct kernel *k) {
  uint8_t *to = buffer + filled;
  int32_t kind = KIND_CONCURRENT_KERNEL;
  if (!buffer || filled + RECORD_BYTES > room) return 0;
  memset(to, 0, RECORD_BYTES);
  memcpy(to, &kind, 4);
  memcpy(to + 16, &k->start, 8);
  memcpy(to + 24, &k->end, 8);
  memcpy(to + 40, &k->device, 4);
  memcpy(to + 48, &k->stream, 4);
  memcpy(to + 92, &k->correlation, 4);
  memcpy(to + 104, &k->name, 8);
  memcpy(to + 144, &k->node, 8);
  memcpy(to + 156, &k->graph, 4);
  filled += RECORD_BYTES;
  return 1;
}

/* Hands the buffer over, which the library frees. */
API long playFinished(void) {
  next = 0;
  if (buffer) onFinished(NULL, 0, buffer, room, filled);
  buffer = NULL;
  return 0;
}
