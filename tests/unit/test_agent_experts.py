"""Who the ranks of a DeepEP exchange are: no communicator tells it, the process's others do."""

from __future__ import annotations

from typing import Any

import pytest

from lanterne.agent.identity import (
    DEEPEP,
    DERIVED,
    ENVIRONMENT,
    NCCL,
    PATIENT_ATTEMPTS,
    Communicator,
    ProcessFacts,
    experts,
    is_expert,
)

WORLD = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "8"}


def nccl(comm_hash: int, *, born: int = 0, **fields: Any) -> Communicator:
    values: dict[str, Any] = {"n_ranks": 8, "rank": 3, "bus_id": "0000:3b:00.0"} | fields
    return Communicator(1, 10, 0x1000, 5, library=NCCL, comm_hash=comm_hash, born_ns=born, **values)


def resolved(
    *siblings: Communicator, env: dict[str, str] | None = None, attempts: int = 0, **place: int
) -> Communicator:
    values: dict[str, Any] = {"n_ranks": 8, "rank": 3} | place
    comm = Communicator(0, 10, 0xDEE9 << 48, 5, library=DEEPEP, attempts=attempts, **values)
    experts(comm, ProcessFacts(5, 77, env or {}), siblings)
    return comm


def test_the_whole_job_is_named_by_its_environment_whoever_is_known() -> None:
    found = {resolved(*known, env=WORLD).comm_hash for known in ((), (nccl(7),), (nccl(8),))}
    assert len(found) == 1
    assert resolved(env=WORLD).identity == ENVIRONMENT
    assert resolved(env=WORLD | {"MASTER_PORT": "1"}).comm_hash not in found


def test_a_part_of_the_job_is_named_by_the_communicator_of_its_ranks() -> None:
    env = WORLD | {"WORLD_SIZE": "16"}
    comm = resolved(nccl(7), nccl(8, n_ranks=16, rank=11), nccl(9, rank=2), env=env)
    assert (comm.identity, comm.parent_hash, comm.bus_id) == (DERIVED, 7, "0000:3b:00.0")
    assert comm.comm_hash == resolved(nccl(7), env=env).comm_hash
    assert comm.comm_hash not in (7, resolved(nccl(6), env=env).comm_hash)


@pytest.mark.parametrize(
    ("siblings", "chosen"),
    [
        ((nccl(5), nccl(9, name="EXPERT_MODEL_PARALLEL_GROUP")), 9),
        ((nccl(5, born=20), nccl(9, born=10)), 9),  # made first, as on every rank
        ((nccl(5, born=20), nccl(9, born=10), nccl(4, born=30, role="ep")), 4),
        ((nccl(5), nccl(9, born=10)), 0),  # one was met running: which came first is not known
    ],
)
def test_which_of_several(siblings: tuple[Communicator, ...], chosen: int) -> None:
    assert resolved(*siblings).parent_hash == chosen


def test_patience_before_the_environment_of_a_part() -> None:
    env = WORLD | {"WORLD_SIZE": "16"}
    early = resolved(env=env)
    assert not early.resolved
    assert "no NCCL communicator" in early.reason
    late = resolved(env=env, attempts=PATIENT_ATTEMPTS)
    assert (late.resolved, late.identity) == (True, ENVIRONMENT)
    nothing = resolved(attempts=PATIENT_ATTEMPTS)
    assert nothing.resolved
    assert nothing.comm_hash != late.comm_hash


def test_without_a_place_nothing_is_known() -> None:
    assert not resolved(env=WORLD, rank=-1).resolved


@pytest.mark.parametrize(
    ("name", "role", "expected"),
    [("ep", "", True), ("EXPERT_MODEL_PARALLEL_GROUP", "", True), ("", "moe", True),
     ("ep_group_0", "", True), ("step", "", False), ("TENSOR_MODEL_PARALLEL_GROUP", "", False),
     ("deepep", "", False), ("default_pg", "", False), ("tp:0", "dp", False)],
)  # fmt: skip
def test_names(name: str, role: str, expected: bool) -> None:
    assert is_expert(name, role) is expected
