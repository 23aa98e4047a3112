/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
#ifndef LANTERNE_STUB_UAPI_TYPES_H
#define LANTERNE_STUB_UAPI_TYPES_H
#include <linux/types.h>
#endif
