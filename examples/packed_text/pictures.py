"""Pictures of a run: who computes which part of the mask, and the loss. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

from packed_text.data import make_batch
from packed_text.model import ModelConfig
from packed_text.train import History, Settings, plan_of
from torch_magi.viz.plan_picture import plot_plan


def draw(settings: Settings, ranks: int, histories: list[History]) -> list[Path]:
    """Write plan.png (of the first batch) and loss.png to `settings.out`.

    Raises:
        ImportError: if matplotlib is missing.
    """
    batch = make_batch(settings.read_corpus(), settings.length, settings.seed, 0)
    plans = [plan_of(batch, ModelConfig(), settings, ranks, rank) for rank in range(ranks)]
    plan_path, loss_path = settings.out / "plan.png", settings.out / "loss.png"
    plot_plan(plans[0], str(plan_path), all_ranks=plans)
    _draw_losses(histories, loss_path)
    return [plan_path, loss_path]


def _draw_losses(histories: list[History], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for index, history in enumerate(histories):
        name = "1 rank" if history.ranks == 1 else f"{history.ranks} ranks"
        steps = range(1, len(history.losses) + 1)
        axes.plot(steps, history.losses, label=name, linewidth=4 - 2.5 * min(index, 1))
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
