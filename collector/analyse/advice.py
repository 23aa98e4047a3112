"""What an operator could do about the experts: one piece of advice for each thing worth saying.

Loads are gathered into planning windows; a new one makes the advice anew. Every piece carries what
it rests on, what it is expected to give on the next window, what it costs, and is silent where
doing nothing is right: then the piece of kind "nothing" says so, and why.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lanterne.collector.analyse import placement, rebalance, rules
from lanterne.collector.analyse.batches import Batches, Found
from lanterne.collector.analyse.placement import Placement
from lanterne.collector.analyse.who import Slot
from lanterne.collector.snapshot import AdviceOption, AdviceView, EngineView, ExpertView, StepView

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

WINDOWS = rebalance.TRIALS + 1  # of planning, kept for each workload
MAX_WORKLOADS = 64
MAX_CELLS = 1 << 17  # layers x experts; the plan of a larger model takes seconds
SERVING = ("vllm", "sglang")
GIB = float(1 << 30)


@dataclass(frozen=True)
class AdviceConfig:
    """seconds: length of a planning window. spare_slots: replicas a GPU has room for in each layer.
    expert_bytes: weights of one expert of one layer, 0 where not known. groups: expert groups of
    group-limited routing. shared_expert_ranks: workload -> the rank that holds the shared experts,
    for engines that do not hold them on every rank.
    """

    seconds: float = 30.0
    min_gain: float = rebalance.MIN_GAIN
    spare_slots: int = 1
    expert_bytes: float = 0.0
    groups: int = 1
    shared_expert_ranks: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Group:
    """The expert-parallel ranks of a workload, as its communicators show them."""

    gpus: int
    nodes: int


def expert_groups(slots: Iterable[Slot | None], node: npt.NDArray[np.int32]) -> dict[str, Group]:
    """Per workload the largest communicator in which dispatch or combine was seen.

    node: [member] node number, -1 unknown, as the registry holds it.
    """
    found: dict[str, Group] = {}
    for slot in slots:
        if slot is None or not any(role for _, role, _ in slot.kinds):
            continue
        if slot.workload not in found or found[slot.workload].gpus < slot.ranks:
            nodes = np.unique(node[slot.base : slot.base + slot.ranks])
            found[slot.workload] = Group(slot.ranks, max(1, int((nodes >= 0).sum())))
    return found


class _Loads:
    """Planning windows of one workload's experts."""

    def __init__(self, view: ExpertView) -> None:
        self.shape = view.load.shape
        self.layer = view.layer
        self.closed: list[F64] = []
        self.current: F64 = np.zeros(self.shape)
        self.tokens: F64 = np.zeros(self.shape[0])
        self.began = view.window_end
        self.seen = 0.0

    def fits(self, view: ExpertView) -> bool:
        return self.shape == view.load.shape and self.layer == view.layer

    def add(self, view: ExpertView, seconds: float) -> bool:
        """Whether that closed a planning window. A view that was added before changes nothing."""
        if view.window_end <= self.seen:
            return False
        self.seen = view.window_end
        self.current += view.load
        self.tokens += np.nan_to_num(view.tokens)
        if view.window_end - self.began < seconds:
            return False
        self.closed = [*self.closed, self.current][-WINDOWS:]
        self.current, self.began = np.zeros(self.shape), view.window_end
        return True


class Advisor:
    """`add` the views of every analysis window, read `advice`."""

    def __init__(self, config: AdviceConfig | None = None) -> None:
        self.config = config or AdviceConfig()
        self._loads: dict[str, _Loads] = {}
        self._due: dict[str, None] = {}  # workloads with a new planning window, the oldest first
        self._dropped: dict[str, float] = {}
        self._advice: dict[str, tuple[AdviceView, ...]] = {}
        self._batches = Batches()
        self._of_steps: dict[str, AdviceView] = {}

    def add_steps(self, steps: Iterable[tuple[str, StepView]]) -> None:
        """Take the steps of an analysis window, by workload."""
        told = dict(steps)
        self._batches.forget(set(told))
        self._of_steps = {}
        for workload, view in told.items():
            self._batches.add(workload, view)
            found = self._batches.of(workload)
            if found is not None and (piece := _batch(workload, found)) is not None:
                self._of_steps[workload] = piece

    def add(
        self,
        views: Iterable[ExpertView],
        groups: Mapping[str, Group],
        engines: Iterable[EngineView] = (),
    ) -> None:
        """Take an analysis window; plans for one workload at a time: it may take a second.

        views: of now; those that are not primary are left out. groups: by workload. engines: what
        they tell of themselves, of which `dropped_assignments` counts since the last report.
        """
        live = {v.workload: v for v in views if v.primary and v.unit in ("logical", "physical")}
        for workload in set(self._loads) - set(live):
            del self._loads[workload]
            for kept in (self._advice, self._due, self._dropped):
                kept.pop(workload, None)
        for engine in engines:
            if engine.workload in live:
                told = engine.values.get("dropped_assignments", 0.0)
                self._dropped[engine.workload] = self._dropped.get(engine.workload, 0.0) + told
        for workload, view in live.items():
            loads = self._loads.get(workload)
            if loads is None or not loads.fits(view):
                if loads is None and len(self._loads) >= MAX_WORKLOADS:
                    continue
                loads = self._loads[workload] = _Loads(view)
            if loads.add(view, self.config.seconds):
                self._due[workload] = None
        if self._due:
            workload = next(iter(self._due))
            del self._due[workload]
            found = self._advise(live[workload], self._loads[workload], groups.get(workload))
            self._advice[workload] = found

    def advice(self) -> tuple[AdviceView, ...]:
        """Of all workloads; within one the largest gain first, "nothing" last."""
        found = [piece for pieces in self._advice.values() for piece in pieces]
        return (*found, *self._of_steps.values())

    def _advise(
        self, view: ExpertView, loads: _Loads, group: Group | None
    ) -> tuple[AdviceView, ...]:
        found = []
        where, assumed = current_placement(view, group)
        if where is None:
            reason = (
                "where the experts are is not known: neither the engine nor a communicator says"
            )
            found.append(_nothing(view, reason, ()))
        elif view.load.size > MAX_CELLS:
            found.append(_nothing(view, "more experts than can be planned for here", ()))
        else:
            found.append(self._rebalance(view, loads, where, group, assumed))
            found += self._shared(view, loads, where)
        found += self._bias(view, loads)
        found += self._dropping(view, loads)
        return tuple(sorted(found, key=lambda a: (a.kind == "nothing", -np.nan_to_num(a.gain))))

    def _rebalance(
        self, view: ExpertView, loads: _Loads, where: Placement, group: Group | None, assumed: bool
    ) -> AdviceView:
        c = self.config
        nodes = group.nodes if group is not None and where.gpus % group.nodes == 0 else 1
        verdict = rebalance.weigh(
            np.array(loads.closed),
            where,
            groups=c.groups if view.load.shape[1] % c.groups == 0 else 1,
            nodes=nodes,
            spare_slots=c.spare_slots * where.gpus,
            min_gain=c.min_gain,
        )
        options = tuple(self._option(o) for o in verdict.options)
        reason = verdict.reason + ("; experts assumed to be placed in order" if assumed else "")
        best = verdict.best
        if best.plan is None:
            return _nothing(view, reason, options)
        added, sent = best.cost_bytes(c.expert_bytes or math.nan)
        cost = {"added_slots": float(best.added_slots), "moved_experts": float(best.moved)}
        if c.expert_bytes:
            cost |= {"added_gib": added / GIB, "migration_gib": sent / GIB}
        what = {
            "placement": "Place the experts anew, without more replicas",
            "hot_set": "Add replicas of the hot experts, leave the others where they are",
            "replication": "Replicate and place the experts anew",
        }[best.name]
        return AdviceView(
            workload=view.workload,
            kind=best.name,
            text=f"{what}: the busiest GPU would have {best.gain:.1%} less to do.",
            gain=best.gain,
            evidence={
                "trials": float(best.trials),
                "at_least": best.at_least,
                "worst": best.worst,
                "planned_gain": best.planned_gain,
                "assumed_order": float(assumed),
            },
            cost=cost,
            reason=reason,
            options=options,
            layers=view.layer,
            plan=best.plan.phy2log,
            gpus=best.plan.gpus,
        )

    def _option(self, option: rebalance.Option) -> AdviceOption:
        return AdviceOption(
            kind=option.name,
            gain=option.gain,
            at_least=option.at_least,
            added_slots=option.added_slots,
            moved_experts=option.moved,
        )

    def _shared(self, view: ExpertView, loads: _Loads, where: Placement) -> list[AdviceView]:
        rank = self.config.shared_expert_ranks.get(view.workload, -1)
        tokens = view.tokens
        if not 0 <= rank < where.gpus or np.isnan(tokens).all():
            return []
        routed = placement.gpu_load(where, view.load)
        shared = rules.shared_with_hot(routed, np.full(len(routed), rank), np.nan_to_num(tokens))
        if not shared:
            return []
        gain = sum(s.gain for s in shared) / len(routed)
        first = view.layer[shared[0].layer]
        return [
            AdviceView(
                workload=view.workload,
                kind="move_shared",
                text=f"Rank {rank} holds the shared experts beside hot routed ones in "
                f"{len(shared)} of {len(routed)} layers: move the shared experts, those of layer "
                f"{first} to rank {shared[0].better_gpu}.",
                gain=gain,
                evidence={"layers": float(len(shared)), "largest_gain": shared[0].gain},
                reason="tokens of the shared experts on top of the routed load of their rank",
            )
        ]

    def _bias(self, view: ExpertView, loads: _Loads) -> list[AdviceView]:
        """For training only: a router that serves must not be touched."""
        if view.engine.lower() in SERVING or not loads.closed:
            return []
        steps = rules.bias_steps(loads.closed[-1])
        share = float(np.mean(steps != 0))
        if share == 0:
            return []
        return [
            AdviceView(
                workload=view.workload,
                kind="bias",
                text=f"In training: move the routing bias of {share:.0%} of the experts by "
                f"{rules.GAMMA} against their load.",
                gain=math.nan,
                evidence={"share_of_experts": share, "gamma": rules.GAMMA},
                reason="outside the dead-band of 5 % and of what chance gives",
                warning="Only while training, with the bias used for selection alone; in inference "
                "it changes what the model answers.",
            )
        ]

    def _dropping(self, view: ExpertView, loads: _Loads) -> list[AdviceView]:
        told = rules.dropping(loads.closed[-1], self._dropped.pop(view.workload, 0.0))
        if told is None:
            return []
        return [
            AdviceView(
                workload=view.workload,
                kind="stop_dropping",
                text=f"{told.dropped_share:.2%} of the assignments are dropped: route without a "
                f"capacity, or with a factor of {told.capacity_factor_needed:.2f}.",
                gain=math.nan,
                evidence={
                    "dropped_share": told.dropped_share,
                    "capacity_factor_needed": told.capacity_factor_needed,
                },
                reason="the engine reports dropped assignments; they change what is answered",
            )
        ]


def _nothing(view: ExpertView, reason: str, options: tuple[AdviceOption, ...]) -> AdviceView:
    return AdviceView(
        workload=view.workload,
        kind="nothing",
        text="Leave the experts where they are.",
        gain=0.0,
        reason=reason,
        options=options,
    )


def _batch(workload: str, found: Found) -> AdviceView | None:
    """None where larger batches paid in everything that was seen."""
    limit = found.limit
    if limit.communication_above is None and limit.saturated_above is None:
        return None
    evidence = {"sizes": float(found.sizes), "smallest": found.smallest, "largest": found.largest}
    said = []
    if limit.communication_above is not None:
        evidence["communication_above"] = limit.communication_above
        said.append(
            f"from {limit.communication_above:,.0f} {found.unit} a step on, dispatch and combine "
            "take longer than the experts"
        )
    if limit.saturated_above is not None:
        evidence["saturated_above"] = limit.saturated_above
        said.append(
            f"beyond {limit.saturated_above:,.0f} {found.unit} a step, doubling the batch adds "
            f"less than {rules.STILL_RISING:.0%} to what is worked off in a second"
        )
    return AdviceView(
        workload=workload,
        kind="batch",
        text=f"Do not make batches larger for throughput: {', and '.join(said)}.",
        gain=math.nan,
        evidence=evidence,
        reason=f"medians over the steps of {found.sizes} sizes",
    )


def current_placement(view: ExpertView, group: Group | None) -> tuple[Placement | None, bool]:
    """-> (where the replicas are now, whether that is assumed); None where it cannot be known.

    What the engine tells counts. If it does not, the order in which engines start: expert e on GPU
    e // (experts / GPUs).
    """
    layers, experts = view.load.shape
    rank_of, logical_of = view.rank_of_expert, view.logical_of_physical
    if rank_of is not None:
        logical = np.broadcast_to(np.arange(experts), view.load.shape)
        return _by_rank(rank_of, logical if logical_of is None else logical_of, experts), False
    if logical_of is not None and group is not None and logical_of.shape[1] % group.gpus == 0:
        return placement.from_slots(logical_of, experts, group.gpus), True
    if logical_of is None and group is not None and experts % group.gpus == 0:
        return placement.in_order(layers, experts, group.gpus), True
    return None, False


def _by_rank(rank_of: I64, logical_of: I64, experts: int) -> Placement | None:
    """None where the ranks do not hold equally many."""
    gpus = int(rank_of.max()) + 1
    held = np.apply_along_axis(np.bincount, 1, rank_of, minlength=gpus)
    if (held != held[0, 0]).any():
        return None
    order = np.argsort(rank_of, axis=1, kind="stable")
    try:
        return placement.from_slots(np.take_along_axis(logical_of, order, axis=1), experts, gpus)
    except ValueError:  # an expert without a replica: what the engine told does not fit together
        return None
