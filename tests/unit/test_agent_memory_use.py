"""What an agent keeps in memory for nothing, on every node."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from lanterne.agent.unique import unique

_PROGRAM = """
import sys
import lanterne.agent.daemon, lanterne.agent.uprobes
from tests.bench import agent_pipeline
agent_pipeline.measure(ranks=8, grouped=True, seconds=0.1)
agent_pipeline.measure(ranks=8, grouped=False, seconds=0.1)
print(*sorted({"numpy.ma", "difflib", "pickletools"} & set(sys.modules)))
"""


def test_a_window_imports_nothing_that_is_not_needed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


@given(arrays.arrays(st.sampled_from([np.uint32, np.int64, np.bool_]), st.integers(0, 50)))
def test_unique_is_numpys(values: np.ndarray) -> None:
    found, expected = unique(values), np.unique(values)
    assert found.dtype == expected.dtype
    assert found.tolist() == expected.tolist()
