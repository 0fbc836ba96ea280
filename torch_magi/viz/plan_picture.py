"""Pictures of a plan: the mask coloured by the rank that computes each part, and every rank's stages.

Takes plans as they are and imports nothing else of torch_magi.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

RANK_SYMBOLS = string.digits + string.ascii_lowercase + string.ascii_uppercase
HIDDEN = "."


def rank_symbol(rank: int) -> str:
    """Return the character that stands for a rank: 0-9, a-z, A-Z, and again from 0 on."""
    return RANK_SYMBOLS[rank % len(RANK_SYMBOLS)]


def plan_to_string(plan: Any, max_rows: int = 32, max_columns: int = 64) -> str:
    """Draw the mask in characters: each visible part shows the rank that computes it, '.' is hidden.

    Each line is one query row, taken from the middle of the rows that it stands for.

    Args:
        plan: an AttnPlan.
        max_rows, max_columns: the most lines and characters in a line.
    """
    visible, owner = sample_rows(plan, max_rows, max_columns)
    return "\n".join(
        "".join(rank_symbol(int(rank)) if share > 0 else HIDDEN for share in row)
        for row, rank in zip(visible, owner, strict=True)
    )


def sample_rows(plan: Any, max_rows: int, max_columns: int) -> tuple[Array, Array]:
    """Return what evenly spaced query rows see, and who computes them.

    Args:
        plan: an AttnPlan.
        max_rows, max_columns: the most rows to take, and the most cells to divide the keys into.

    Returns:
        visible float64 [rows, cells]: the visible share of each cell; owner int64 [rows]: ranks.
    """
    sq, sk = plan.mask.shape
    rows, cells = min(sq, max_rows), min(sk, max_columns)
    edges = np.array([sk * i // cells for i in range(cells + 1)] if cells else [0], np.int64)
    visible = np.zeros((rows, cells))
    taken = np.array([sq * (2 * i + 1) // (2 * rows) for i in range(rows)], np.int64)
    for line, row in enumerate(taken.tolist()):
        _, intervals = plan.mask.row_intervals(row, row + 1)
        for first, end in intervals:
            overlap = np.minimum(edges[1:], end) - np.maximum(edges[:-1], first)
            visible[line] += np.maximum(overlap, 0)
    visible /= np.maximum(np.diff(edges), 1)
    segments = plan.dispatch.segments
    return visible, segments[np.searchsorted(segments[:, 1], taken, side="right"), 2]


def plot_plan(plan: Any, path: str | None = None, all_ranks: Sequence[Any] | None = None) -> Any:
    """Draw a plan: left the mask, coloured by the rank that computes each part; right the ranks' stages.

    Args:
        plan: an AttnPlan.
        path: where to write the picture; None returns the figure instead.
        all_ranks: the plans of all ranks, to show the stages of each. None: the stages of the plan's own rank
            are shown, and of the others their totals.

    Returns:
        The matplotlib figure, or None where it was written to `path`.

    Raises:
        ImportError: if matplotlib is missing.
    """
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(
            "plot needs matplotlib, which is not installed; pip install matplotlib, or torch_magi[plot]"
        ) from None
    figure = Figure(figsize=(13, 6), layout="constrained")
    mask_axes, stage_axes = figure.subplots(1, 2)
    colours = 10 if plan.cp_size <= 10 else 20
    palette = colormaps[f"tab{colours}"](np.arange(plan.cp_size) % colours)[:, :3]
    _draw_mask(mask_axes, plan, palette)
    _draw_stages(stage_axes, plan, {p.cp_rank: p for p in (all_ranks or [plan])}, palette)
    if path is None:
        return figure
    figure.savefig(path, dpi=110)
    return None


def _draw_mask(axes: Any, plan: Any, palette: Array) -> None:
    sq, sk = plan.mask.shape
    visible, owner = sample_rows(plan, 600, 600)
    share = np.clip(visible, 0.0, 1.0)[:, :, None]
    image = 1.0 - share + share * palette[owner][:, None, :]
    if image.size:
        axes.imshow(image, extent=(0, sk, sq, 0), aspect="auto", interpolation="nearest")
    axes.set_xlabel("key")
    axes.set_ylabel("query")
    axes.set_title(f"{plan.mask.area:,} visible pairs, coloured by rank")


def _draw_stages(axes: Any, plan: Any, plans: dict[int, Any], palette: Array) -> None:
    """Draw one bar a rank, in visible pairs: its stages in the order in which they are computed."""
    busiest = max(plan.area_per_rank, default=0)
    for rank, area in enumerate(plan.area_per_rank):
        mine = plans.get(rank)
        parts = [area] if mine is None else [stage.mask.area for stage in mine.stages]
        begin = 0
        for index, width in enumerate(parts):
            axes.barh(
                rank, width, left=begin, height=0.6, color=palette[rank], alpha=max(1.0 - 0.22 * index, 0.25),
                edgecolor="black", linewidth=0.6,
            )  # fmt: skip
            if mine is not None and width > 0.08 * busiest:
                label = _stage_label(mine.stages[index], index)
                axes.text(begin + width / 2, rank, label, ha="center", va="center", fontsize=8)
            begin += width
        axes.text(begin, rank, f" {plan.comm_rows_per_rank[rank]:,} rows in", va="center", fontsize=8)
    axes.axvline(sum(plan.area_per_rank) / plan.cp_size, color="black", linestyle=":", linewidth=1)
    axes.set_xlim(0, max(busiest, 1) * 1.2)
    axes.set_yticks(range(plan.cp_size))
    axes.invert_yaxis()
    axes.set_ylabel("rank")
    axes.set_xlabel("visible pairs computed, stage after stage (dotted: the mean of the ranks)")
    mib = plan.comm_bytes / (1 << 20)
    axes.set_title(f"largest / mean {plan.imbalance:.3f}; {mib:,.2f} MiB of keys and values sent")


def _stage_label(stage: Any, index: int) -> str:
    if stage.comm is None:
        return f"stage {index}\nown keys"
    return f"stage {index}\n{stage.comm.rows_from_others:,} rows"
