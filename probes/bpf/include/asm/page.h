/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Only the unit in which bcc's ring macro counts: our ring sizes are given in units of 4096
 * bytes also where pages are larger. */
#ifndef LANTERNE_STUB_PAGE_H
#define LANTERNE_STUB_PAGE_H
#define PAGE_SIZE 4096
#endif
