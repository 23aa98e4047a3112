/* SPDX-License-Identifier: Apache-2.0 */
#include "names.h"

#include <string.h>

#include "lanterne_usdt.h"

/* By number: ncclFunc_t of 2.29 and later, and ncclDataType_t. */
static const char *const funcs[] = {"Broadcast", "Reduce",     "AllGather", "ReduceScatter",
                                    "AllReduce", "SendRecv",   "Send",      "Recv",
                                    "AlltoAll",  "Scatter",    "Gather",    "AllGatherV",
                                    "PutSignal", "Signal",     "WaitSignal"};
static const char *const dtypes[] = {"Int8",    "Uint8",   "Int32",    "Uint32",
                                     "Int64",   "Uint64",  "Float16",  "Float32",
                                     "Float64", "Bfloat16", "Float8e4m3", "Float8e5m2"};
static const uint8_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

enum { FUNCS = sizeof(funcs) / sizeof(*funcs), DTYPES = sizeof(dtypes) / sizeof(*dtypes) };
_Static_assert(sizeof(sizes) == DTYPES, "one size a type");

static uint8_t find(const char *name, const char *const *names, unsigned count) {
  for (unsigned i = 0; i < count; i++) {
    if (name[0] == names[i][0] && !strcmp(name, names[i])) return (uint8_t)i;
  }
  return 255;
}

uint8_t func_of(const char *name) { return name ? find(name, funcs, FUNCS) : LANTERNE_FUNC_UNKNOWN; }

bool func_has_root(uint8_t func) { return func <= 1 || func == 9 || func == 10; }

uint8_t dtype_of(const char *name) {
  if (!name || strncmp(name, "nccl", 4)) return DTYPE_UNKNOWN;
  return find(name + 4, dtypes, DTYPES);
}

unsigned dtype_bytes(uint8_t dtype) { return dtype < DTYPES ? sizes[dtype] : 0; }
