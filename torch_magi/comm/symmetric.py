"""Rows through symmetric memory: GPUs of one node copy them out of each other's memory, straight into place.

Each rank puts its rows where the others can read them, all meet, each copies the ranges that it needs with the copy
engines of its GPU, and all meet again, after which the memory may be used for something else. Nothing is packed, and no
multiprocessor is held while rows travel. It happens on a stream of its own, one exchange after the other.
"""

from __future__ import annotations

import functools
import math
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from torch_magi.comm.groups import resolve_group
from torch_magi.plan import CommPlan
from torch_magi.plan.types import Move

Tensor = torch.Tensor

_workspaces: WeakKeyDictionary[dist.ProcessGroup, Tensor] = WeakKeyDictionary()


class _Copied(dist.Work):
    """Copies on a stream."""

    def __init__(self, done: torch.cuda.Event) -> None:
        super().__init__()
        self._done = done

    def wait(self, timeout: timedelta | None = None) -> bool:
        torch.cuda.current_stream().wait_event(self._done)
        return True


def start_copies(x: Tensor, rows: int, moves: tuple[Move, ...], comm: CommPlan, group_name: str) -> Tensor:
    """Start copying rows out of the other ranks' `x` and return the tensor they come to, to be read after `wait`.

    Args:
        x: [rows of this rank, ...], on a GPU.
        rows: of the result.
        moves: which rows come from where.
        comm: the plan that they are from.
        group_name: of a process group whose ranks are on one node; all of them must call.

    Raises:
        NotImplementedError: where there is no symmetric memory.
    """
    if not x.is_cuda:
        raise NotImplementedError(
            f"transport='symmetric_memory' moves rows between GPUs of one node, got rows on {x.device}; plan with "
            "transport='all_to_all'"
        )
    assert comm.moves is not None
    x, out = x.contiguous(), x.new_empty((rows, *x.shape[1:]))
    row_bytes = math.prod(x.shape[1:]) * x.element_size()
    current, stream = torch.cuda.current_stream(x.device), copy_stream(x.device)
    with torch.cuda.device(x.device):
        workspace = _workspace(resolve_group(group_name), comm.moves.workspace_rows * row_bytes, x.device, stream)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            copy_rows(x, out, moves, comm.rank, workspace)
            work = _Copied(stream.record_event())
    for tensor in (x, out):
        tensor.record_stream(stream)
    torch._C._distributed_c10d._register_work(out, work)
    return out


def copy_rows(x: Tensor, out: Tensor, moves: tuple[Move, ...], rank: int, workspace: Any) -> None:
    """Copy rows of all ranks' `x` into `out`.

    Args:
        x, out: [rows, ...]; of this rank.
        moves: which rows come from where.
        rank: this rank.
        workspace: symmetric memory that holds the `x` of any rank: `get_buffer(rank, sizes, dtype)`, `barrier()`.
    """
    if x.numel():
        workspace.get_buffer(rank, x.shape, x.dtype).copy_(x)
    workspace.barrier()
    for move in moves if out.numel() else ():
        source = x
        if move.rank != rank:
            source = workspace.get_buffer(move.rank, (move.last, *x.shape[1:]), x.dtype)
        out[move.at : move.at + move.last - move.first].copy_(source[move.first : move.last])
    workspace.barrier()


@functools.cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of a device on which rows are copied or sent on."""
    return torch.cuda.Stream(device)


def _workspace(group: dist.ProcessGroup, size: int, device: torch.device, stream: torch.cuda.Stream) -> Any:
    """Return symmetric memory of at least `size` bytes, the same on all ranks: they come here together."""
    import torch.distributed._symmetric_memory as symmetric_memory

    held = _workspaces.get(group)
    try:
        if held is None or held.numel() < size:
            stream.synchronize()  # the copies out of what is held now
            held = symmetric_memory.empty(max(size, 1), dtype=torch.uint8, device=device)
            _workspaces[group] = held
        return symmetric_memory.rendezvous(held, group)
    except RuntimeError as error:
        raise NotImplementedError(
            "transport='symmetric_memory' needs GPUs of one node that can map each other's memory; plan with "
            f"transport='all_to_all'. torch says: {error}"
        ) from error
