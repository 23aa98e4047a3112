/* Command line of a rank. */
#include <getopt.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "job.h"

struct options options = {
    .ranks = 1, .hidden = 128, .layers = 2, .reduceCount = 256, .graceSeconds = 3,
    .attnUs = 400, .expertUs = 50, .expertNsPerToken = 500, .name = "rigjob",
    .routing = {.experts = 8, .topk = 2, .tokens = 64, .zipf = 0.5, .seed = 1, .hotExpert = -1},
};

static const char usage[] =
    "rigjob: one rank of a simulated expert-parallel job\n"
    "  --rank N --ranks N --ranks-per-node N --uid-file PATH   who and where\n"
    "  --tokens N --hidden N --experts N --topk N --zipf S --seed N   routing\n"
    "  --layers N --steps N --seconds S   length (no limit: until SIGTERM)\n"
    "  --attn-us T --expert-us T --expert-ns-per-token T   base times of a layer\n"
    "  --mode eager|run-ahead|graph   when the host waits for the device\n"
    "  --equal-split   one ncclAlltoAll instead of grouped sends and receives\n"
    "  --dp-groups G   second communicator: G groups, one all-reduce a step\n"
    "  --pipeline      third: pairs of neighbours, one send a step\n"
    "  --fault F[@STEP]   repeatable: slow-rank:R:FACTOR slow-host:R:MS hang:R:STEP crash:R:STEP\n"
    "      intermittent:R:FACTOR:PERIOD hot-expert:E:FACTOR slow-sender:R:MS slow-receiver:R:MS\n"
    "      slow-path:SRC:DST:MS\n"
    "  --truth PATH --truth-every S   ground truth, at exit and every S seconds\n"
    "  --start-file PATH [--init-first]   wait for the file before (after) communicator init\n"
    "  --grace S   after SIGTERM, how long to try for a step boundary\n";

void die(const char *format, ...) {
  va_list args;
  va_start(args, format);
  fprintf(stderr, "rigjob rank %d: ", options.rank);
  vfprintf(stderr, format, args);
  fputc('\n', stderr);
  va_end(args);
  exit(2);
}

enum {
  O_RANK = 256, O_RANKS, O_RPN, O_UID, O_TOKENS, O_HIDDEN, O_EXPERTS, O_TOPK, O_ZIPF, O_SEED,
  O_LAYERS, O_STEPS, O_SECONDS, O_ATTN, O_EXPERT, O_EXPERT_TOKEN, O_MODE, O_EQUAL, O_DP, O_PIPE,
  O_FAULT, O_TRUTH, O_EVERY, O_START, O_INIT_FIRST, O_GRACE, O_NAME, O_REDUCE, O_HELP,
};

static const struct option table[] = {
    {"rank", 1, 0, O_RANK}, {"ranks", 1, 0, O_RANKS}, {"ranks-per-node", 1, 0, O_RPN},
    {"uid-file", 1, 0, O_UID}, {"tokens", 1, 0, O_TOKENS}, {"hidden", 1, 0, O_HIDDEN},
    {"experts", 1, 0, O_EXPERTS}, {"topk", 1, 0, O_TOPK}, {"zipf", 1, 0, O_ZIPF},
    {"seed", 1, 0, O_SEED}, {"layers", 1, 0, O_LAYERS}, {"steps", 1, 0, O_STEPS},
    {"seconds", 1, 0, O_SECONDS}, {"attn-us", 1, 0, O_ATTN}, {"expert-us", 1, 0, O_EXPERT},
    {"expert-ns-per-token", 1, 0, O_EXPERT_TOKEN}, {"mode", 1, 0, O_MODE},
    {"equal-split", 0, 0, O_EQUAL}, {"dp-groups", 1, 0, O_DP}, {"pipeline", 0, 0, O_PIPE},
    {"fault", 1, 0, O_FAULT}, {"truth", 1, 0, O_TRUTH}, {"truth-every", 1, 0, O_EVERY},
    {"start-file", 1, 0, O_START}, {"init-first", 0, 0, O_INIT_FIRST}, {"grace", 1, 0, O_GRACE},
    {"name", 1, 0, O_NAME}, {"reduce-count", 1, 0, O_REDUCE}, {"help", 0, 0, O_HELP},
    {0, 0, 0, 0},
};

static enum mode parseMode(const char *text) {
  if (!strcmp(text, "eager")) return MODE_EAGER;
  if (!strcmp(text, "run-ahead")) return MODE_RUN_AHEAD;
  if (!strcmp(text, "graph")) return MODE_GRAPH;
  die("unknown mode %s", text);
}

static void addFaults(const char *text) {
  size_t used = strlen(options.faults);
  if (used + strlen(text) + 2 > sizeof(options.faults)) die("too many faults");
  sprintf(options.faults + used, "%s%s", used ? "," : "", text);
}

static void take(int option, const char *value) {
  struct options *o = &options;
  switch (option) {
    case O_RANK: o->rank = atoi(value); break;
    case O_RANKS: o->ranks = o->routing.ranks = atoi(value); break;
    case O_RPN: o->ranksPerNode = atoi(value); break;
    case O_UID: o->uidFile = value; break;
    case O_TOKENS: o->routing.tokens = atoi(value); break;
    case O_HIDDEN: o->hidden = atoi(value); break;
    case O_EXPERTS: o->routing.experts = atoi(value); break;
    case O_TOPK: o->routing.topk = atoi(value); break;
    case O_ZIPF: o->routing.zipf = atof(value); break;
    case O_SEED: o->routing.seed = strtoull(value, NULL, 0); break;
    case O_LAYERS: o->layers = atoi(value); break;
    case O_STEPS: o->steps = strtoull(value, NULL, 0); break;
    case O_SECONDS: o->seconds = atof(value); break;
    case O_ATTN: o->attnUs = atof(value); break;
    case O_EXPERT: o->expertUs = atof(value); break;
    case O_EXPERT_TOKEN: o->expertNsPerToken = atof(value); break;
    case O_MODE: o->mode = parseMode(value); break;
    case O_EQUAL: o->equalSplit = true; break;
    case O_DP: o->dpGroups = atoi(value); break;
    case O_PIPE: o->pipeline = true; break;
    case O_FAULT: addFaults(value); break;
    case O_TRUTH: o->truth = value; break;
    case O_EVERY: o->truthEvery = atof(value); break;
    case O_START: o->startFile = value; break;
    case O_INIT_FIRST: o->initFirst = true; break;
    case O_GRACE: o->graceSeconds = atof(value); break;
    case O_NAME: o->name = value; break;
    case O_REDUCE: o->reduceCount = atoi(value); break;
    case O_HELP: fputs(usage, stdout); exit(0);
    default: fputs(usage, stderr); exit(2);
  }
}

static void check(void) {
  const struct options *o = &options;
  if (o->ranks < 1 || o->rank < 0 || o->rank >= o->ranks) die("rank must be in 0..ranks-1");
  if (o->routing.experts < 1 || o->routing.experts % o->ranks) die("experts must divide by ranks");
  if (o->routing.topk < 1 || o->routing.topk > o->routing.experts) die("topk must be in 1..experts");
  if (o->routing.tokens < 1 || o->hidden < 1 || o->layers < 1) die("sizes must be positive");
  if (o->equalSplit && !ncclAlltoAll) die("this libnccl has no ncclAlltoAll");
  if (o->reduceCount < 1) die("reduce-count must be positive");
  if (o->ranks > 1 && !o->uidFile) die("--uid-file is needed for more than one rank");
}

void optionsParse(int argc, char **argv) {
  const char *env = getenv("RIG_FAULT");
  options.routing.ranks = options.ranks;
  if (env && *env) addFaults(env);
  for (int option; (option = getopt_long(argc, argv, "h", table, NULL)) != -1;) {
    take(option == 'h' ? O_HELP : option, optarg);
  }
  if (options.ranksPerNode < 1) options.ranksPerNode = options.ranks;
  check();
}
