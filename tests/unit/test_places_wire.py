"""Pods and names of workloads from the agent's window over the wire to what people see."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from agent_arrays import BASE_NS, comm_event, record
from agent_readings import Gpu, Reading
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from lanterne.agent.comms import Registry
from lanterne.agent.encode import Context, Head
from lanterne.agent.events import Rules
from lanterne.agent.pipeline import Pipeline
from lanterne.agent.places import Place as Found
from lanterne.agent.process import Processes
from lanterne.collector.analyse.engine import Engine
from lanterne.collector.analyse.settings import EngineConfig
from lanterne.collector.batch import DecodedBatch
from lanterne.collector.decode import decode
from lanterne.collector.errors import BatchRefused
from lanterne.collector.export import families, write
from lanterne.collector.handover import Packer, Unpacker
from lanterne.collector.screen import screen
from lanterne.collector.snapshot import Place, Snapshot
from lanterne.collector.view import view
from lanterne.probes.layout import CommFlag, CommKind
from lanterne.proto import telemetry_pb2 as pb
from tests.fixtures.snapshots import snapshot

SMALL = EngineConfig(
    cells=1 << 16, rows=1 << 12, communicators=16, members=1 << 10, processes=64, own_cells=1 << 12
)
FOUND = Found(
    pod="train-0",
    namespace="ml",
    container="main",
    owner_kind="PyTorchJob",
    owner="train",
    slurm_job="7",
    slurm_step="0",
    unit="kubelet.service",
    mig="MIG-1",
    gpu_bus_id="0000:3b:00.0",
    workload="ml/train",
)


def sent(tmp_path: Path, places: dict[tuple[int, int], Found]) -> DecodedBatch:
    """The window of an agent that saw process 10 (started at tick 5) make one call."""
    folder = tmp_path / "10"
    folder.mkdir(exist_ok=True)
    (folder / "stat").write_text("10 (x) S 1 1 10 " + "0 " * 15 + "5 0 0\n")
    (folder / "environ").write_text("JOB_NAME=by-environment\0")
    registry = Registry(
        libraries=lambda _: (),
        processes=Processes(tmp_path),
        workload_variables=["JOB_NAME"],
    )
    pipe = Pipeline(registry, Rules(), Head("node-1", 1, "0", "b"), BASE_NS, grace_ns=1000)
    born = comm_event(
        CommKind.INIT, id=b"u" * 128, n_ranks=4, rank=1, flags=CommFlag.ID | CommFlag.RANK
    )
    pipe.feed(record(), born, BASE_NS)
    context = Context(processes={10: Reading()}, gpus=[Gpu()], places=places)
    ((_, data),) = pipe.close(BASE_NS + 10**9, 1, lambda: context, final=True)
    return decode(data)


def test_a_place_goes_over_the_wire(tmp_path: Path) -> None:
    batch = sent(tmp_path, {(10, 5): FOUND})
    assert batch.communicators.workload == ("ml/train",)
    # The communicator told no GPU: it is the only one of the container.
    assert (batch.communicators.gpu_bus_id, batch.communicators.gpu_index) == (
        ("0000:3b:00.0",),
        (2,),
    )
    told = batch.head.processes[0]
    for name in Place._fields:
        assert told[name] == getattr(FOUND, name), name
    (place,) = batch.head.process_places
    assert Place(*place) == Place(*(getattr(FOUND, name) for name in Place._fields))
    (again,) = Unpacker().unpack(Packer().pack([batch]))
    assert isinstance(again, DecodedBatch)
    assert again.head == batch.head


@pytest.mark.parametrize("places", [{}, {(10, 6): FOUND}])
def test_of_no_place_or_another_process_nothing_is_said(
    tmp_path: Path, places: dict[tuple[int, int], Found]
) -> None:
    batch = sent(tmp_path, places)
    assert batch.communicators.workload == ("by-environment",)
    assert batch.communicators.gpu_bus_id == ("",)
    assert batch.head.process_places == ()
    assert batch.head.processes[0]["pod"] == ""


@pytest.mark.parametrize("field", Place._fields)
@pytest.mark.parametrize("value", ["x" * 300, "a\nb"])
def test_texts_of_a_hostile_agent_are_refused(field: str, value: str) -> None:
    batch = told("job")
    setattr(batch.processes[0], field, value)
    with pytest.raises(BatchRefused) as refused:
        decode(batch.SerializeToString())
    assert refused.value.code == "text"


def told(workload: str, *, rank: int = 0, sequence: int = 1, name: str = "", pod: str = "p"
         ) -> pb.Batch:  # fmt: skip
    """A window in which one rank of two is described, and nothing happened."""
    end = sequence * 10**9
    batch = pb.Batch(
        schema=1, node=f"node-{rank}", epoch=1, sequence=sequence, stride=1, start_ns=end - 10**9,
        end_ns=end,
    )  # fmt: skip
    batch.communicators.add(
        comm_hash=77, library=pb.LIBRARY_NCCL, n_ranks=2, rank=rank, pid=10 + rank,
        pid_start_ticks=5, workload=workload, name=name, identity=pb.IDENTITY_INIT_ARGUMENTS,
        complete=True, gpu_index=rank,
    )  # fmt: skip
    batch.processes.add(pid=10 + rank, pid_start_ticks=5, namespace="ml", pod=pod, owner="o")
    return batch


def seen(*batches: pb.Batch) -> Snapshot:
    engine = Engine(SMALL)
    for n, batch in enumerate(batches, 1):
        engine.apply(decode(batch.SerializeToString(), received_ns=n * 10**9))
    return engine.snapshot(float(len(batches)))


@pytest.mark.parametrize(
    ("names", "workload"),
    [
        ([(0, ""), (0, "ml/train")], "ml/train"),  # the pod was learned after the first window
        ([(0, ""), (1, "ml/train")], "ml/train"),
        ([(0, "ml/train"), (0, "")], "ml/train"),  # and is not forgotten with the API server
        ([(0, "ml/train"), (1, "12345"), (0, "ml/train")], "ml/train"),
        ([(0, "12345"), (1, "ml/train"), (0, "ml/new")], "ml/new"),
    ],
)
def test_a_workload_that_is_learned_late(names: list[tuple[int, str]], workload: str) -> None:
    shot = seen(*(told(name, rank=rank, sequence=n) for n, (rank, name) in enumerate(names, 1)))
    assert [(c.workload, c.name) for c in shot.communicators] == [(workload, "nccl-2ranks-0")]


def test_labels_of_renamed_communicators_do_not_collide() -> None:
    one, other = told("a", name="ep"), told("", name="ep", sequence=2)
    other.communicators[0].comm_hash = 78
    renamed = told("a", name="ep", sequence=3)
    renamed.communicators[0].comm_hash = 78
    shot = seen(one, other, renamed)
    assert sorted((c.workload, c.name) for c in shot.communicators) == [("a", "ep"), ("a", "ep-2")]


def test_the_info_metric_joins_ranks_and_pods() -> None:
    shot = seen(told("job"), told("job", rank=1, pod=""))
    page = write(families(shot, None)).decode()
    (info,) = [f for f in text_string_to_metric_families(page) if f.name == "lanterne_rank_info"]
    assert [(s.labels, s.value) for s in info.samples] == [
        ({"workload": "job", "comm": "nccl-2ranks-0", "rank": "0", "node": "node-0", "gpu": "0",
          "namespace": "ml", "pod": "p", "container": "", "owner": "o"}, 1.0)
    ]  # fmt: skip


def printed(shot: Snapshot, width: int) -> list[str]:
    console = Console(width=width, height=40, color_system=None, force_terminal=False)
    with console.capture() as out:
        console.print(screen(view(shot), width=width, height=40, address="http://c:1"))
    return out.get().splitlines()


def test_top_shows_the_pod() -> None:
    assert "POD" not in "".join(printed(snapshot(), 200))
    named = snapshot(places={(0, 1005): Place("train-5", "ml")})
    lines = printed(named, 200)
    assert any("rank 5 (node0:5, pod ml/train-5) holds up" in line for line in lines)
    row = next(line for line in lines if line.startswith("   5"))
    assert "ml/train-5" in row
    assert np.count_nonzero(["ml/train-5" in line for line in lines]) == 2
