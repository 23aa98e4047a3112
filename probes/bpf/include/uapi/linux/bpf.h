/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* bcc carries the BPF interface inside itself. */
#ifndef LANTERNE_STUB_UAPI_BPF_H
#define LANTERNE_STUB_UAPI_BPF_H
#include <linux/types.h>
#include <bcc/bpf.h>
#endif
