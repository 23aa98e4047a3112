/* Reductions, element by element, in rank order: the same bits on every rank. */
#include <string.h>

#include "exec.h"

size_t typeSize(ncclDataType_t type) {
  static const unsigned char sizes[ncclNumTypes] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return (unsigned)type < ncclNumTypes ? sizes[type] : 0;
}

static float fromBf16(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, sizeof(value));
  return value;
}

static uint16_t toBf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

#define COMBINE(op, a, b)                                                                         \
  ((op) == ncclProd  ? (a) * (b)                                                                  \
   : (op) == ncclMax ? ((a) > (b) ? (a) : (b))                                                    \
   : (op) == ncclMin ? ((a) < (b) ? (a) : (b))                                                    \
                     : (a) + (b))

#define LOOP(T)                                                                                   \
  do {                                                                                            \
    T *x = acc;                                                                                   \
    const T *y = in;                                                                              \
    for (size_t i = 0; i < count; i++) x[i] = (T)COMBINE(op, x[i], y[i]);                         \
  } while (0)

void reduceInto(void *acc, const void *in, size_t count, ncclDataType_t type, ncclRedOp_t op) {
  switch (type) {
    case ncclInt8: LOOP(int8_t); break;
    case ncclUint8: LOOP(uint8_t); break;
    case ncclInt32: LOOP(int32_t); break;
    case ncclUint32: LOOP(uint32_t); break;
    case ncclInt64: LOOP(int64_t); break;
    case ncclUint64: LOOP(uint64_t); break;
    case ncclFloat16: LOOP(_Float16); break;
    case ncclFloat32: LOOP(float); break;
    case ncclFloat64: LOOP(double); break;
    case ncclBfloat16: {
      uint16_t *x = acc;
      const uint16_t *y = in;
      for (size_t i = 0; i < count; i++) {
        float a = fromBf16(x[i]), b = fromBf16(y[i]);
        x[i] = toBf16(COMBINE(op, a, b));
      }
      break;
    }
    default: break; /* 8-bit floats: rank 0's bytes stay */
  }
}

#define SCALE(T, factor)                                                                          \
  do {                                                                                            \
    T *x = data;                                                                                  \
    for (size_t i = 0; i < count; i++) x[i] = (T)(x[i] * (factor));                               \
  } while (0)

/* PreMulSum: each rank's own contribution times its own scalar. */
void reduceScale(struct rigComm *rc, void *data, size_t count, ncclDataType_t type, ncclRedOp_t op) {
  if ((int)op < ncclNumOps) return;
  const void *scalar = rc->userOps[op - ncclNumOps].scalar;
  switch (type) {
    case ncclFloat16: SCALE(_Float16, *(const _Float16 *)scalar); break;
    case ncclFloat32: SCALE(float, *(const float *)scalar); break;
    case ncclFloat64: SCALE(double, *(const double *)scalar); break;
    case ncclInt32: SCALE(int32_t, *(const int32_t *)scalar); break;
    case ncclInt64: SCALE(int64_t, *(const int64_t *)scalar); break;
    case ncclUint32: SCALE(uint32_t, *(const uint32_t *)scalar); break;
    case ncclUint64: SCALE(uint64_t, *(const uint64_t *)scalar); break;
    case ncclUint8: SCALE(uint8_t, *(const uint8_t *)scalar); break;
    case ncclInt8: SCALE(int8_t, *(const int8_t *)scalar); break;
    default: break;
  }
}

#define DIVIDE(T)                                                                                 \
  do {                                                                                            \
    T *x = acc;                                                                                   \
    for (size_t i = 0; i < count; i++) x[i] = (T)(x[i] / (T)nranks);                              \
  } while (0)

void reduceFinish(void *acc, size_t count, ncclDataType_t type, ncclRedOp_t op, int nranks) {
  if (op != ncclAvg) return;
  switch (type) {
    case ncclInt8: DIVIDE(int8_t); break;
    case ncclUint8: DIVIDE(uint8_t); break;
    case ncclInt32: DIVIDE(int32_t); break;
    case ncclUint32: DIVIDE(uint32_t); break;
    case ncclInt64: DIVIDE(int64_t); break;
    case ncclUint64: DIVIDE(uint64_t); break;
    case ncclFloat16: DIVIDE(_Float16); break;
    case ncclFloat32: DIVIDE(float); break;
    case ncclFloat64: DIVIDE(double); break;
    case ncclBfloat16: {
      uint16_t *x = acc;
      for (size_t i = 0; i < count; i++) x[i] = toBf16(fromBf16(x[i]) / (float)nranks);
      break;
    }
    default: break;
  }
}
