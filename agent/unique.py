"""Distinct values of an array, without what `np.unique` brings in."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

_Scalar = TypeVar("_Scalar", bound=np.generic)


def unique(values: npt.NDArray[_Scalar]) -> npt.NDArray[_Scalar]:
    """[n] -> sorted, each once. `np.unique` without its options imports numpy.ma: more than a
    megabyte in every agent, to ask whether the array is masked."""
    ordered = np.sort(values)
    first = np.ones(len(ordered), np.bool_)
    first[1:] = ordered[1:] != ordered[:-1]
    return ordered[first]
