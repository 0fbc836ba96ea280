"""Save and resume with torch.distributed.checkpoint: a folder a checkpoint, read by any number of ranks."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Path:
    """Write folder/step_N, N being the number of steps taken. Every rank calls it. Returns the path."""
    path = folder / f"step_{step}"
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": torch.tensor(step)}
    dcp.save(state, checkpoint_id=path)
    return path


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Restore model and optimizer from a checkpoint. Every rank calls it. Returns the steps taken.

    Raises:
        SystemExit: if the folder is no checkpoint.
    """
    if not (path / ".metadata").exists():
        raise SystemExit(f"--resume must be a checkpoint, such as CHECKPOINT_FOLDER/step_60, got {path}")
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": torch.tensor(0)}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return int(state["step"])
