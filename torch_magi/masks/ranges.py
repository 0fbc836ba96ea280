"""Half-open ranges and cumulative lengths from whatever the caller has: lists, numpy arrays, tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

Integers = Sequence[Any] | np.ndarray | torch.Tensor
IntArray = np.ndarray[Any, np.dtype[np.int64]]


def int_array(name: str, values: Any) -> IntArray:
    """Return a copy of `values` as an int64 array.

    Raises:
        TypeError: if `values` holds anything but integers.
    """
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().numpy()
    array = np.array(values)
    if array.size == 0:
        return array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold integers, got {array.dtype}")
    return array.astype(np.int64)


def check_length(name: str, value: Any) -> int:
    """Return `value` as a length; TypeError or ValueError if it is none."""
    number = _check_int(name, value)
    if number < 0:
        raise ValueError(f"{name} must be 0 or more, got {number}")
    return number


def check_positive(name: str, value: Any) -> int:
    """Return `value` as a length of at least 1; TypeError or ValueError if it is none."""
    number = _check_int(name, value)
    if number < 1:
        raise ValueError(f"{name} must be positive, got {number}")
    return number


def _check_int(name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an int, got {value!r}")
    return int(value)


def range_array(name: str, values: Any, length: int) -> IntArray:
    """Return ranges as int64 [n, 2].

    Raises:
        TypeError: if `values` holds anything but integers.
        ValueError: if the shape is not [n, 2], a range is reversed or lies outside [0, length].
    """
    array = int_array(name, values)
    if array.size == 0:
        return array.reshape(0, 2)
    if array.ndim != 2 or array.shape[1] != 2:
        raise ValueError(f"{name} must have shape [n, 2], got {array.shape}")
    wrong = (array[:, 0] > array[:, 1]) | (array[:, 0] < 0) | (array[:, 1] > length)
    if wrong.any():
        i = int(np.flatnonzero(wrong)[0])
        found = array[i].tolist()
        what = "must not be reversed" if found[0] > found[1] else f"must lie in [0, {length}]"
        raise ValueError(f"{name} {what}, got {found} at index {i}")
    return array


def cumulative_lengths(name: str, values: Any, total: int | None = None) -> tuple[IntArray, int]:
    """Return cu_seqlens as int64 [n + 1] and the total length.

    Args:
        name: the argument's name, for errors.
        values: [n + 1], from 0 upwards; equal neighbours are documents without tokens.
        total: length of the whole; None: the last value. Rows behind the last value belong to no document.

    Raises:
        TypeError: if `values` holds anything but integers.
        ValueError: if they do not begin with 0, fall, or pass `total`.
    """
    array = int_array(name, values)
    if array.ndim != 1 or not len(array):
        raise ValueError(f"{name} must have shape [num_documents + 1] and begin with 0, got shape {array.shape}")
    if array[0] != 0:
        raise ValueError(f"{name} must begin with 0, got {int(array[0])}")
    fall = np.flatnonzero(np.diff(array) < 0)
    if len(fall):
        i = int(fall[0])
        raise ValueError(f"{name} must not fall, got {int(array[i])} before {int(array[i + 1])} at index {i}")
    last = int(array[-1])
    if total is None:
        return array, last
    total = check_length("total", total)
    if total < last:
        raise ValueError(f"total must be at least the last value of {name}, {last}, got {total}")
    return array, total
