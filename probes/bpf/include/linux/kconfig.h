/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The only switch that bcc itself asks for. */
#ifndef LANTERNE_STUB_KCONFIG_H
#define LANTERNE_STUB_KCONFIG_H
#define CONFIG_BPF_SYSCALL 1
#endif
