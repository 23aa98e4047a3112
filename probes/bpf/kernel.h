/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What is told of kernels. The mirror is probes/parcagpu.py; a contract test compares. */
#ifndef LANTERNE_KERNEL_H
#define LANTERNE_KERNEL_H

/* What parcagpu tells of one kernel that the GPU has run, in a ring of its own. 64 bytes, stride 72.
 * start_ns and end_ns are CUPTI's, on a clock that the reader finds out. */
struct lanterne_kernel {
	__u64 told_ns;     /* CLOCK_MONOTONIC when it was told: some time after the end */
	__u64 start_ns;
	__u64 end_ns;
	__u64 name;        /* key in the map kernel_names; 0: could not be read */
	__u64 node;        /* of the graph */
	__u32 tgid;
	__u32 correlation; /* of the launch; one for all kernels of a graph launch */
	__u32 device;      /* as the process numbers them */
	__u32 stream;      /* CUPTI's number */
	__u32 graph;       /* 0: launched by itself */
	__u32 seq;         /* per tgid, from 0: a gap is what the ring lost */
};

/* Per process: whether parcagpu tells of every launch. It limits their rate, by default to a few a
 * second, and tells only of the kernels of launches that it has told of. */
struct lanterne_told {
	__u64 launches; /* that it told of (cuda_correlation) */
	__u64 base;     /* launches counted at libcuda - launches, when both were first known */
	__u64 missed;   /* launches counted at libcuda - base - launches, at the last one told */
	__u64 whole_ns; /* when a launch was told and none had been missed, last */
	__u64 kernels;  /* next seq */
	__u64 based;    /* base is valid */
};

#define LANTERNE_NAME_BYTES 256 /* of a kernel's name that are read, the NUL included */

_Static_assert(sizeof(struct lanterne_kernel) == 64, "parcagpu.KERNEL mirrors this");
_Static_assert(sizeof(struct lanterne_told) == 48, "parcagpu.TOLD mirrors this");

#endif
