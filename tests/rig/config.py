"""What a job of the rig is asked to do: the options of `rigjob` as a value."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class JobConfig:
    """The options of `rigjob`; times are per layer."""

    ranks: int = 4
    ranks_per_node: int = 0  # 0: all on one node
    tokens: int = 64
    hidden: int = 128
    experts: int = 0  # 0: two per rank
    topk: int = 2
    zipf: float = 0.5
    seed: int = 1
    layers: int = 2
    steps: int = 0  # 0: until `seconds` are over or the job is stopped
    seconds: float = 0.0
    attn_us: float = 400.0
    expert_us: float = 50.0
    expert_ns_per_token: float = 500.0
    mode: str = "eager"
    equal_split: bool = False
    dp_groups: int = 0
    pipeline: bool = False
    reduce_count: int = 256
    faults: tuple[str, ...] = ()
    truth_every: float = 0.0
    grace: float = 3.0
    name: str = "rigjob"

    @property
    def expert_count(self) -> int:
        return self.experts or 2 * self.ranks

    @property
    def hot_expert(self) -> tuple[int, float, int] | None:
        """Expert, factor and first step of a hot-expert fault."""
        for fault in self.faults:
            text, _, first = fault.partition("@")
            kind, *args = text.split(":")
            if kind == "hot-expert":
                return int(args[0]), float(args[1]), int(first or 0)
        return None

    def arguments(self) -> list[str]:
        special = {"faults", "experts", "ranks_per_node"}
        out = [f"--experts={self.expert_count}"]
        out.append(f"--ranks-per-node={self.ranks_per_node or self.ranks}")
        out += [f"--fault={fault}" for fault in self.faults]
        for item in fields(self):
            value = getattr(self, item.name)
            flag = "--" + item.name.replace("_", "-")
            if item.name in special or value is False:
                continue
            out.append(flag if value is True else f"{flag}={value}")
        return out
