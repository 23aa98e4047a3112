/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* struct pt_regs under its kernel field names (bcc's PT_REGS_* and we use them). */
#ifndef LANTERNE_STUB_UAPI_PTRACE_H
#define LANTERNE_STUB_UAPI_PTRACE_H
#include <linux/types.h>

#if defined(__TARGET_ARCH_arm64) || defined(__aarch64__)
struct user_pt_regs {
	__u64 regs[31];
	__u64 sp;
	__u64 pc;
	__u64 pstate;
};
struct pt_regs {
	__u64 regs[31];
	__u64 sp;
	__u64 pc;
	__u64 pstate;
};
#else
struct pt_regs {
	unsigned long r15, r14, r13, r12, bp, bx;
	unsigned long r11, r10, r9, r8;
	unsigned long ax, cx, dx, si, di;
	unsigned long orig_ax;
	unsigned long ip, cs, flags, sp, ss;
};
#endif
#endif
