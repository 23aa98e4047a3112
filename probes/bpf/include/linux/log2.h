/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* bcc's helpers include this; nothing of it is used. */
#ifndef LANTERNE_STUB_LINUX_LOG2_H
#define LANTERNE_STUB_LINUX_LOG2_H
#endif
