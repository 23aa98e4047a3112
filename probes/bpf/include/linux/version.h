/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The programs use no feature that is chosen at compile time; the kernel ignores the number. */
#ifndef LANTERNE_STUB_VERSION_H
#define LANTERNE_STUB_VERSION_H
#define KERNEL_VERSION(a, b, c) (((a) << 16) + ((b) << 8) + (c))
#ifndef LINUX_VERSION_CODE
#define LINUX_VERSION_CODE KERNEL_VERSION(5, 15, 0)
#endif
#endif
