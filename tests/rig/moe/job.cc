// SPDX-License-Identifier: Apache-2.0
// An expert-parallel job on one host, as far as its host side goes: every rank is a process that
// calls DeepEP's launchers in the order in which DeepEP does. Computing is sleeping. In normal mode
// the ranks wait for each other's counts between notify_dispatch and dispatch, for real, over
// shared memory; in low-latency mode nobody waits on the host, and with a hook the receiving half of
// an exchange is a call of its own.
#include "deep_ep.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

namespace {

constexpr int kMaxRanks = 64;

struct Options {
	int ranks = 4, layers = 4, steps = 10, tokens = 512, hidden = 1024, topk = 4, experts = 32;
	int attn_us = 2000, expert_us = 1000, slow_rank = -1, slow_us = 0, hot_rank = -1, worst = 0;
	const char *mode = "normal", *start = nullptr;
} options;

struct Truth {
	long dispatches, combines, sent_tokens, received_tokens;
};

struct Shared {
	std::atomic<long> arrived[kMaxRanks];
	std::atomic<long> met[kMaxRanks];
	Truth truth[kMaxRanks];
} *shared;

void nap(int us)
{
	timespec left = {us / 1000000, us % 1000000 * 1000L};
	while (us > 0 && nanosleep(&left, &left)) {
	}
}

// Until every rank has come as far as `number`; returns when this rank saw it.
void wait_for_all(std::atomic<long> *of, int rank, long number)
{
	of[rank].store(number, std::memory_order_release);
	for (int peer = 0; peer < options.ranks; peer++)
		while (of[peer].load(std::memory_order_acquire) < number)
			nap(20);
}

// Tokens that `from` sends to `to` in a layer, the same on every rank that asks.
int routed(int from, int to, int layer)
{
	int even = options.tokens / options.ranks;
	int uneven = (from * 7 + to * 3 + layer) % (even / 2 + 1);
	return even / 2 + uneven + (to == options.hot_rank ? 2 * even : 0);
}

int received(int rank, int layer)
{
	int sum = 0;
	for (int from = 0; from < options.ranks; from++)
		sum += routed(from, rank, layer);
	return sum;
}

cudaStream_t stream()
{
	return reinterpret_cast<cudaStream_t>(0x5000);
}

void normal_layer(int rank, int layer, long number, Truth &truth)
{
	namespace ep = LAUNCHERS;
	int tokens = options.tokens, hidden = options.hidden, ranks = options.ranks;
	int back = received(rank, layer);

	ep::layout::get_dispatch_layout(nullptr, nullptr, nullptr, nullptr, nullptr, tokens,
					options.topk, ranks, options.experts, stream());
	ep::intranode::notify_dispatch(nullptr, nullptr, ranks, nullptr, nullptr, options.experts,
				       tokens, nullptr, nullptr, nullptr, 0, 1, nullptr, nullptr,
				       rank, stream(), 10);
	if (!options.worst)
		wait_for_all(shared->arrived, rank, number);
	ep::intranode::dispatch(nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
				nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, tokens,
				options.worst, hidden / 8, options.topk, options.experts, 0, 0, 0,
				nullptr, rank, ranks, stream(), 20, 6, 256);
	nap(options.expert_us);
	ep::intranode::combine(CUDA_R_16BF, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
			       nullptr, nullptr, nullptr, nullptr, back, tokens, hidden,
			       options.topk, nullptr, rank, ranks, stream(), 20, 4, 256);
	truth.sent_tokens += tokens;
	truth.received_tokens += back;
}

void ll_dispatch(int rank, int phases)
{
#if BUILD == V121
	LAUNCHERS::internode_ll::dispatch(
		nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
		nullptr, nullptr, nullptr, nullptr, 0, options.tokens, options.hidden,
		options.tokens, options.topk, options.experts, rank, options.ranks, true, false,
		false, nullptr, 132, stream(), phases);
#elif BUILD == HEAD
	LAUNCHERS::internode_ll::dispatch(
		nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
		nullptr, nullptr, nullptr, nullptr, nullptr, 0, options.tokens, options.hidden,
		options.tokens, options.topk, options.experts, rank, options.ranks, true, false,
		false, nullptr, 132, stream(), phases);
#else
	LAUNCHERS::internode_ll::dispatch(
		nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
		nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, 0, options.tokens,
		options.hidden, options.tokens, options.topk, options.experts, rank, options.ranks,
		true, false, false, false, nullptr, 132, stream(), phases);
#endif
}

void ll_combine(int rank, int phases)
{
#if BUILD == V121
	LAUNCHERS::internode_ll::combine(
		nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
		nullptr, nullptr, 0, options.tokens, options.hidden, options.tokens, options.topk,
		options.experts, rank, options.ranks, false, nullptr, 132, stream(), phases, false);
#elif BUILD == HEAD
	LAUNCHERS::internode_ll::combine(
		nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
		nullptr, nullptr, nullptr, 0, options.tokens, options.hidden, options.tokens,
		options.topk, options.experts, rank, options.ranks, false, nullptr, 132, stream(),
		phases, false);
#else
	LAUNCHERS::internode_ll::combine(
		nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
		nullptr, nullptr, nullptr, 0, options.tokens, options.hidden, options.tokens,
		options.topk, options.experts, rank, options.ranks, false, nullptr, 132, stream(),
		phases, false, false, nullptr, 0);
#endif
}

void ll_layer(int rank, bool hook, Truth &truth)
{
	if (hook) {
		ll_dispatch(rank, 1);
		ll_dispatch(rank, 2);
	} else {
		ll_dispatch(rank, 3);
	}
	nap(options.expert_us);
	if (hook) {
		ll_combine(rank, 1);
		ll_combine(rank, 2);
	} else {
		ll_combine(rank, 3);
	}
	truth.sent_tokens += options.tokens;
}

void run(int rank)
{
	Truth &truth = shared->truth[rank];
	bool normal = !strcmp(options.mode, "normal"), hook = !strcmp(options.mode, "hook");
	long number = 0;

	while (options.start && access(options.start, F_OK))
		nap(5000);
	for (int step = 0; step < options.steps; step++) {
		wait_for_all(shared->met, rank, step + 1);
		for (int layer = 0; layer < options.layers; layer++) {
			nap(options.attn_us + (rank == options.slow_rank ? options.slow_us : 0));
			if (normal)
				normal_layer(rank, layer, ++number, truth);
			else
				ll_layer(rank, hook, truth);
			truth.dispatches++;
			truth.combines++;
		}
	}
}

void read_options(int argc, char **argv)
{
	struct {
		const char *name;
		int *value;
	} numbers[] = {
		{"ranks", &options.ranks}, {"layers", &options.layers}, {"steps", &options.steps},
		{"tokens", &options.tokens}, {"hidden", &options.hidden}, {"topk", &options.topk},
		{"experts", &options.experts}, {"attn-us", &options.attn_us},
		{"expert-us", &options.expert_us}, {"slow-rank", &options.slow_rank},
		{"slow-us", &options.slow_us}, {"hot-rank", &options.hot_rank},
		{"worst", &options.worst},
	};

	for (int i = 1; i < argc; i++) {
		char *value = strchr(argv[i], '=');
		size_t length = value ? value - argv[i] - 2 : 0;
		bool known = false;

		if (strncmp(argv[i], "--", 2) || !value)
			break;
		const char *name = argv[i] + 2;
		for (auto &one : numbers)
			if (strlen(one.name) == length && !strncmp(one.name, name, length)) {
				*one.value = atoi(value + 1);
				known = true;
			}
		if (!strncmp(name, "mode=", 5))
			options.mode = value + 1, known = true;
		if (!strncmp(name, "start=", 6))
			options.start = value + 1, known = true;
		if (known)
			continue;
		fprintf(stderr, "epjob: %s is not known\n", argv[i]);
		exit(2);
	}
	if (options.ranks < 1 || options.ranks > kMaxRanks) {
		fprintf(stderr, "epjob: 1 to %d ranks\n", kMaxRanks);
		exit(2);
	}
}

} // namespace

int main(int argc, char **argv)
{
	pid_t children[kMaxRanks];
	int failed = 0, status;

	read_options(argc, argv);
	shared = static_cast<Shared *>(mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE,
					    MAP_SHARED | MAP_ANONYMOUS, -1, 0));
	if (shared == MAP_FAILED)
		return 1;
	for (int rank = 0; rank < options.ranks; rank++) {
		children[rank] = fork();
		if (!children[rank]) {
			run(rank);
			_exit(0);
		}
	}
	for (int rank = 0; rank < options.ranks; rank++)
		failed |= waitpid(children[rank], &status, 0) < 0 || status;
	printf("[");
	for (int rank = 0; rank < options.ranks; rank++) {
		const Truth &t = shared->truth[rank];
		printf("%s{\"dispatches\": %ld, \"combines\": %ld, \"sent_tokens\": %ld, "
		       "\"received_tokens\": %ld}",
		       rank ? ", " : "", t.dispatches, t.combines, t.sent_tokens,
		       t.received_tokens);
	}
	printf("]\n");
	return failed;
}
