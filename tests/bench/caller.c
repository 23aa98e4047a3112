/* SPDX-License-Identifier: Apache-2.0 */
/* Calls ncclAllReduce of the library named by the first argument, as often as each line of standard
 * input says, and prints nanoseconds per call. The communicator is not one, so the call ends right
 * after the probed entry: what a probe adds is not lost in what a collective costs. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

typedef int (*all_reduce)(const void *, void *, size_t, int, int, void *, void *);

static double seconds(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

int main(int argc, char **argv)
{
	void *library = argc > 1 ? dlopen(argv[1], RTLD_NOW) : NULL;
	all_reduce call = library ? (all_reduce)dlsym(library, "ncclAllReduce") : NULL;
	void *comm = calloc(1, 4 << 20);
	long calls;

	if (!call || !comm) {
		fprintf(stderr, "caller: %s\n", library ? "no ncclAllReduce" : dlerror());
		return 1;
	}
	printf("ready\n");
	fflush(stdout);
	while (scanf("%ld", &calls) == 1) {
		double start = seconds();

		for (long i = 0; i < calls; i++)
			call(NULL, NULL, 1, 7, 0, comm, NULL);
		printf("%.3f\n", (seconds() - start) * 1e9 / (double)calls);
		fflush(stdout);
	}
	return 0;
}
