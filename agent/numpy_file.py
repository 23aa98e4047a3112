"""Arrays from .npy and .npz bytes, of plain numbers only and bounded. Pure.

numpy's own reader allocates what a header claims before it looks for the data; here a header that
claims other than what is there is refused.
"""

from __future__ import annotations

import io
import math
import zipfile
from typing import Any

import numpy as np
import numpy.typing as npt

MAX_ARRAYS = 64


def npy(data: bytes) -> npt.NDArray[Any]:
    """The array of one .npy file: integers, floats or booleans. Raises ValueError."""
    file = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(file)
        if version == (1, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
        elif version == (2, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_2_0(file)
        else:
            raise ValueError(f"version {version}")
    except Exception as error:  # the header is parsed as Python: anything can be wrong with it
        raise ValueError(f"is no .npy file: {error}") from None
    if dtype.kind not in "iufb" or dtype.itemsize > 8:
        raise ValueError(f"holds {dtype}; only numbers are read")
    if any(side < 0 for side in shape):
        raise ValueError(f"has shape {shape}")
    rest = len(data) - file.tell()
    if math.prod(shape) * dtype.itemsize != rest:
        raise ValueError(f"has shape {shape} of {dtype}, but {rest} bytes")
    flat = np.frombuffer(data, dtype, offset=file.tell())
    return flat.reshape(shape, order="F" if fortran else "C")


def npz(data: bytes, *, limit: int) -> dict[str, npt.NDArray[Any]]:
    """The arrays of one .npz file, unpacked at most `limit` bytes together. Raises ValueError."""
    found: dict[str, npt.NDArray[Any]] = {}
    left = limit
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if len(archive.infolist()) > MAX_ARRAYS:
                raise ValueError(f"has more than {MAX_ARRAYS} members")
            for member in archive.infolist():
                with archive.open(member) as stream:
                    part = stream.read(left + 1)  # whatever its header claims
                left -= len(part)
                if left < 0:
                    raise ValueError(f"unpacks to more than {limit} bytes")
                found[member.filename.removesuffix(".npy")] = npy(part)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OSError) as error:
        raise ValueError(f"is no .npz file: {error}") from None
    return found
