"""A picture of a mask. Takes plain numbers and imports nothing of torch_magi."""

from __future__ import annotations

from typing import Any

import numpy as np


def plot_coverage(cells: np.ndarray[Any, Any], shape: tuple[int, int], title: str, path: str | None = None) -> Any:
    """Draw which share of each cell of a grid is visible.

    Args:
        cells: float64 [rows, columns]; visible shares, 0 to 1, of equal cells of the mask.
        shape: queries and keys of the mask.
        title: what is written above it.
        path: where to write the picture; None returns the figure instead.

    Returns:
        The matplotlib figure, or None where it was written to `path`.

    Raises:
        ImportError: if matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(
            "plot needs matplotlib, which is not installed; pip install matplotlib, or torch_magi[plot]"
        ) from None
    figure = Figure(figsize=(6, 6), layout="constrained")
    axes = figure.subplots()
    if cells.size:
        axes.imshow(
            cells, cmap="Blues", vmin=0.0, vmax=1.0, extent=(0, shape[1], shape[0], 0), aspect="auto",
            interpolation="nearest",
        )  # fmt: skip
    axes.set_xlabel("key")
    axes.set_ylabel("query")
    axes.set_title(title)
    if path is None:
        return figure
    figure.savefig(path, dpi=110)
    return None
