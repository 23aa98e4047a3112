/* SPDX-License-Identifier: Apache-2.0 */
/* NCCL names functions and data types by strings; a record carries their numbers. */
#ifndef LANTERNE_NAMES_H
#define LANTERNE_NAMES_H

#include <stdbool.h>
#include <stdint.h>

enum { FUNC_SEND = 6, FUNC_RECV = 7, DTYPE_UNKNOWN = 255 };

uint8_t func_of(const char *name);  /* ncclFunc_t, or LANTERNE_FUNC_UNKNOWN */
bool func_has_root(uint8_t func);
uint8_t dtype_of(const char *name); /* ncclDataType_t, or DTYPE_UNKNOWN */
unsigned dtype_bytes(uint8_t dtype); /* 0: unknown */

#endif
