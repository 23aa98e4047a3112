/* SPDX-License-Identifier: Apache-2.0
 *
 * Faults of the machine that one process can be shown without the others noticing: preloaded, it
 * answers some calls of libc in another way. The file that FAULTS_CONTROL names holds two numbers,
 * which may change at any time: seconds by which CLOCK_REALTIME is off, and milliseconds that a
 * sync of a file below FAULTS_SLOW takes longer.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

struct control {
	volatile long long offset_seconds;
	volatile long long slow_ms;
};

static struct control *control;
static const char *slow_folder;

__attribute__((constructor)) static void start(void)
{
	const char *path = getenv("FAULTS_CONTROL");
	slow_folder = getenv("FAULTS_SLOW");
	int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
	if (fd < 0)
		return;
	void *found = mmap(NULL, sizeof(*control), PROT_READ, MAP_SHARED, fd, 0);
	if (found != MAP_FAILED)
		control = found;
	close(fd);
}

int clock_gettime(clockid_t clock, struct timespec *at)
{
	static int (*real)(clockid_t, struct timespec *);
	if (!real)
		real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
	int result = real(clock, at);
	if (!result && control && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
		at->tv_sec += control->offset_seconds;
	return result;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone)
{
	struct timespec now;
	(void)zone;
	int result = clock_gettime(CLOCK_REALTIME, &now);
	at->tv_sec = now.tv_sec;
	at->tv_usec = now.tv_nsec / 1000;
	return result;
}

time_t time(time_t *at)
{
	struct timespec now;
	clock_gettime(CLOCK_REALTIME, &now);
	if (at)
		*at = now.tv_sec;
	return now.tv_sec;
}

static void linger(int fd)
{
	char link[64], path[PATH_MAX];
	if (!control || !control->slow_ms || !slow_folder)
		return;
	snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
	ssize_t size = readlink(link, path, sizeof(path) - 1);
	if (size < 0)
		return;
	path[size] = 0;
	if (strncmp(path, slow_folder, strlen(slow_folder)))
		return;
	/* A disk that is well again answers at once, also those who were waiting for it. */
	const struct timespec wait = {0, 10 * 1000000L};
	for (long long ms = 0; ms < control->slow_ms; ms += 10)
		nanosleep(&wait, NULL);
}

int fdatasync(int fd)
{
	linger(fd);
	return (int)syscall(SYS_fdatasync, fd);
}

int fsync(int fd)
{
	linger(fd);
	return (int)syscall(SYS_fsync, fd);
}
