/* SPDX-License-Identifier: Apache-2.0 */
/* A tracer in the same process: breakpoints on the probes' nops, semaphores raised by hand. So the
 * library is tested as it is, also where no BPF is to be had and under sanitizers. x86-64. */
#ifndef PLUGIN_TEST_TRACER_H
#define PLUGIN_TEST_TRACER_H

#include <stdbool.h>

enum { PROBES = 4, MAX_ARGS = 6 };

/* "name=site,semaphore,arg:arg:..." with hex addresses in the library; an argument is a register
 * number as in pt_regs order below, or "$constant". */
void tracer_add(const char *spec);
void tracer_start(void *base);
void tracer_arm(const char *name, int by);
void tracer_print(void);
unsigned long tracer_count(const char *name);

#endif
