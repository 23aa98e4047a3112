"""What an agent of a later version says and this collector does not know, taken out of its batch.

Fields that are not known are skipped by Protobuf itself. Here it is about known fields with values
that are not: rows that would be misunderstood are left out, properties become "unknown", and both
are counted. Called only where `decode` has met such a value: batches of known versions never pay.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from lanterne.proto import telemetry_pb2 as pb

LIBRARIES = (1, 2, 3)
IDENTITIES = 8  # values of Identity
LANES, ROLES, EVIDENCES, FLAGS, STAGES = 2, 3, 4, 8, 10
PENDING_STATES = 3
UNITS = (1, 2, 3)

Columns = pb.Instances | pb.Summaries | pb.Traffic | pb.Pending | pb.Stages
U8 = npt.NDArray[np.uint8]
Bool = npt.NDArray[np.bool_]

_TIMES = ("duration_ns", "duration_sum_ns", "duration_min_ns", "duration_max_ns", "histogram")


def leave_out_unknown(m: pb.Batch, left_out: Counter[str]) -> None:
    """Changes `m`; columns of a wrong length are left as they are, for `decode` to refuse."""
    known = np.array([c.library in LIBRARIES for c in m.communicators], bool)
    for c in m.communicators:
        if not 0 <= c.identity < IDENTITIES:
            c.identity = pb.IDENTITY_UNSPECIFIED
            left_out["unknown_values"] += 1
    for table in (m.instances, m.summaries, m.traffic, m.pending, m.stages):
        _values(table, left_out)
        _rows(table, known, left_out)
    if not known.all():
        left_out["unknown_communicators"] += int((~known).sum())
        if len(m.strides) == 4 * len(known):
            m.strides = np.frombuffer(m.strides, "<u4")[known].tobytes()
        kept = [c for c, keep in zip(m.communicators, known, strict=True) if keep]
        del m.communicators[:]
        m.communicators.extend(kept)
    loads = [load for load in m.expert_loads if load.unit in UNITS]
    left_out["unknown_rows"] += len(m.expert_loads) - len(loads)
    del m.expert_loads[:]
    m.expert_loads.extend(loads)


def _column(table: Columns, field: str) -> U8 | None:
    """A writable copy; None where there is none of the right length."""
    data: bytes = getattr(table, field, b"")
    return np.frombuffer(data, np.uint8).copy() if data and len(data) == table.rows else None


def _values(table: Columns, left_out: Counter[str]) -> None:
    for field, count in (("role", ROLES), ("flags", FLAGS), ("whole", 2)):
        column = _column(table, field)
        if column is None or not (unknown := column >= count).any():
            continue
        column[unknown] = column[unknown] & (FLAGS - 1) if field == "flags" else 0
        setattr(table, field, column.tobytes())
        left_out["unknown_values"] += int(unknown.sum())
    evidence = _column(table, "evidence")
    if evidence is None or isinstance(table, pb.Pending):
        return
    unknown = evidence >= EVIDENCES
    if unknown.any():  # what its times mean is not known: only that and when it was called
        evidence[unknown] = 0
        table.evidence = evidence.tobytes()  # type: ignore[union-attr]
        left_out["unknown_values"] += int(unknown.sum())
        for field in _TIMES:
            data: bytes = getattr(table, field, b"")
            if data and len(data) % table.rows == 0:
                cells = np.frombuffer(data, np.uint8).reshape(table.rows, -1).copy()
                cells[unknown] = 0
                setattr(table, field, cells.tobytes())


def _rows(table: Columns, known: Bool, left_out: Counter[str]) -> None:
    fields = [d.name for d in table.DESCRIPTOR.fields if d.name != "rows"]
    parts = {name: data for name in fields if (data := getattr(table, name))}
    if not table.rows or not parts or any(len(data) % table.rows for data in parts.values()):
        return  # with parts: no more rows than bytes came
    keep = _understood(table)
    index = np.zeros(0, np.uint32)
    if "communicator" in parts and len(parts["communicator"]) == 4 * table.rows:
        index = np.frombuffer(parts["communicator"], "<u4")
        if int(index.max()) >= len(known):
            return
        keep &= known[index]
        # Those that are left move up.
        parts["communicator"] = (np.cumsum(known) - 1)[index].astype("<u4").tobytes()
    for name, data in parts.items():
        setattr(table, name, np.frombuffer(data, np.uint8).reshape(table.rows, -1)[keep].tobytes())
    left_out["unknown_rows"] += int((~keep).sum())
    table.rows = int(keep.sum())


def _understood(table: Columns) -> Bool:
    """Rows that can be told from others: sequence numbers of another lane count something else."""
    keep = np.ones(table.rows, bool)
    bounds = [("lane", LANES), ("stage", STAGES)]
    if isinstance(table, pb.Pending):
        bounds += [("evidence", EVIDENCES), ("state", PENDING_STATES)]
    for field, count in bounds:
        column = _column(table, field)
        if column is not None:
            keep &= column < count
    return keep
