"""What a launch costs with the probes on and off, alternating in one process."""

from __future__ import annotations

import statistics

from tests.gpu.check_cuda import attacher
from tests.gpu.context import Context
from tests.gpu.result import Result, judged

ROUNDS, BATCHES, BATCH = 20, 40, 500  # 20,000 launches a round; a queue holds about 1,000


def cost(context: Context) -> Result:
    """Measures, and fails only where the probes were not on when they should be, or on when not."""
    rounds, batches = (4, 4) if context.rig else (ROUNDS, BATCHES)
    launches = batches * BATCH
    spent: dict[bool, list[float]] = {True: [], False: []}
    plain: list[float] = []
    problems: list[str] = []
    context.watch.stop_agent()  # its probes would be on all the time
    with attacher(context) as switch, context.driver("cost", nccl=False) as driver:
        driver.ask("cost", batches=2, batch=BATCH)
        for number in range(2 * rounds):
            # off on, on off, off on ...: a drift of the clocks hits both alike
            probed = (number + number // 2) % 2 == 1
            before = switch.ask("counts", pid=driver.pid)["launches"]
            if probed:
                switch.ask("attach")
            answer = driver.ask("cost", batches=batches, batch=BATCH)
            if probed:
                switch.ask("detach", within=90.0)
            seen = switch.ask("counts", pid=driver.pid)["launches"] - before
            if seen != (launches if probed else 0):
                problems.append(f"{seen} of {launches} launches counted, probes {probed}")
            spent[probed].append(answer["launch_ns"])
            plain.append(answer["plain_ns"])
    on, off = statistics.median(spent[True]), statistics.median(spent[False])
    ratios = [with_ / without for with_, without in zip(spent[True], spent[False])]  # noqa: B905
    return judged(
        problems,
        f"a probe adds {on - off:.0f} ns to a launch of {off:.0f} ns ({on / off:.2f}x)",
        rounds=rounds,
        launches_per_round=launches,
        ns_with=round(on, 1),
        ns_without=round(off, 1),
        ns_added=round(on - off, 1),
        ratio=round(on / off, 4),
        ratios=[round(ratio, 4) for ratio in ratios],
        ns_plain_call=round(statistics.median(plain), 1),
        method=switch.hello["method"],
    )
