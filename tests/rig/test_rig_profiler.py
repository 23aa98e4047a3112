"""The stand-in NCCL loads a profiler plugin and feeds it, also from captured graphs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.rig.rig import Job, JobConfig

SHORT = {"RIG_NCCL_TIMEOUT_MS": "20000"}


PLUGIN = r"""
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
struct event { char text[64]; uint64_t begin; };
static int rank_;
static FILE *out;
static int init(void **ctx, uint64_t id, int *mask, const char *name, int nodes, int n, int rank,
                void *log) {
  char path[512];
  (void)name, (void)log, (void)ctx;
  snprintf(path, sizeof(path), "%s-%d", getenv("PLUGIN_OUT"), rank);
  out = fopen(path, "w");
  rank_ = rank;
  *mask = 2 | 4 | 64;
  fprintf(out, "init %016llx %d %d\n", (unsigned long long)id, nodes, n);
  return out == NULL;
}
static int start(void *ctx, void **handle, const char *d) {
  (void)ctx;
  uint64_t type = *(const uint64_t *)d;
  *handle = NULL;
  if (type != 2 && type != 4 && type != 64) return 0; /* parents come unasked */
  struct event *e = calloc(1, sizeof(*e));
  if (type == 64) {
    struct event *parent = *(struct event *const *)(d + 8);
    e->begin = *(const uint64_t *)(d + 32);
    snprintf(e->text, sizeof(e->text), "kernel %s", parent->text);
  } else {
    const char *func = *(const char *const *)(d + (type == 2 ? 32 : 24));
    snprintf(e->text, sizeof(e->text), "%s", func);
    fprintf(out, "%s\n", func);
  }
  *handle = e;
  return 0;
}
static int stop(void *handle) { (void)handle; return 0; }
static int state(void *handle, int what, uint64_t *args) {
  struct event *e = handle;
  fprintf(out, "%s %d %d\n", e->text, what, args[0] > e->begin);
  return 0;
}
static int finalize(void *ctx) { (void)ctx; return fclose(out); }
__attribute__((visibility("default"))) struct {
  const char *name; void *calls[5];
} ncclProfiler_v5 = {"test", {init, start, stop, state, finalize}};
"""


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_profiler_plugin_sees_every_operation(tmp_path: Path, mode: str) -> None:
    (tmp_path / "plugin.c").write_text(PLUGIN)
    library = str(tmp_path / "libtest.so")
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-o", library, str(tmp_path / "plugin.c")],
                   check=True)  # fmt: skip
    config = JobConfig(ranks=2, steps=3, layers=1, mode=mode)
    env = SHORT | {"NCCL_PROFILER_PLUGIN": library, "PLUGIN_OUT": f"{tmp_path}/out"}
    with Job(config, env=env) as job:
        assert job.wait() == [0, 0]
        world = job.truth(0)["comms"][0]["hash"][2:]
    for rank in range(2):
        lines = (tmp_path / f"out-{rank}").read_text().splitlines()
        assert lines[0] == f"init {world} 1 2"
        assert lines.count("AllReduce") == lines.count("kernel AllReduce 22 1") == 3
        sends = 2 * 2 * 3  # both peers, dispatch and combine, three steps
        assert lines.count("Send") == lines.count("Recv") == sends
        # What a rank sends to itself has no channel.
        assert lines.count("kernel Send 22 1") == lines.count("kernel Recv 22 1") == sends // 2
