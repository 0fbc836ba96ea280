"""dispatch and undispatch of DTensors: from replicated rows to rows that are sharded in dispatched order, and back."""

from __future__ import annotations

import math

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from torch_magi.comm import dispatch as dispatch_local
from torch_magi.comm import undispatch as undispatch_local
from torch_magi.comm.dispatch import check_plan
from torch_magi.ops.sharding import name_of, sharded_along
from torch_magi.plan import AttnPlan


def dispatch(x: DTensor, plan: AttnPlan, mesh_dim: str | int = "cp") -> DTensor:
    """Return the rows of a DTensor in dispatched order, sharded. Communicates nothing; differentiable.

    Args:
        x: [total_tokens, ...], replicated over `mesh_dim`; over other dimensions of its mesh, sharded along any other
            dimension than the rows, or replicated.
        plan: this rank's, for as many ranks as `mesh_dim` has.
        mesh_dim: the dimension of the mesh, by name or index, whose ranks share the rows.

    Returns:
        [total_tokens, ...], Shard(0) over `mesh_dim`. Its rows are those of all ranks in order: row i of this rank
        is row plan.position_ids[i] of x. The gradient of `x` is a partial sum over `mesh_dim`.

    Raises:
        TypeError: if `x` is not a DTensor or `plan` not an AttnPlan.
        ValueError: if `x` is placed otherwise, for a plan for another number of ranks, or one which gives ranks other
            numbers of rows than Shard(0) would: dispatch local tensors, with torch_magi.dispatch, for such a plan.

    Example:
        >>> import torch, torch_magi as magi
        >>> from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh
        >>> def rows(rank, group):
        ...     mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        ...     plan = magi.make_attn_plan(magi.masks.causal(8), 1, 1, 8, cp_size=2, cp_rank=rank,
        ...                                config=magi.PlanConfig(chunk_size=2))
        ...     x = distribute_tensor(torch.arange(8), mesh, [Replicate()], src_data_rank=None)
        ...     return magi.tensor.dispatch(x, plan).to_local().tolist()
        >>> from torch_magi.testing import run_ranks
        >>> run_ranks(rows, 2)
        [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    check_plan(plan)
    cp_dim = _cp_dim(x, plan, mesh_dim)
    if not x.placements[cp_dim].is_replicate() or sharded_along(x.device_mesh, x.placements, 0):
        raise ValueError(
            f"x must be replicated over {name_of(x.device_mesh, cp_dim)} and not sharded along its rows, got "
            f"placements {list(x.placements)}; see DTensor.redistribute"
        )
    if not torch.compiler.is_compiling():
        _check_even(plan)
    placements = list(x.placements)
    placements[cp_dim] = Partial()
    local = dispatch_local(x.to_local(grad_placements=placements), plan)
    placements[cp_dim] = Shard(0)
    return DTensor.from_local(local, x.device_mesh, placements, run_check=False, shape=x.shape, stride=_stride(x.shape))


def undispatch(x: DTensor, plan: AttnPlan, mesh_dim: str | int = "cp") -> DTensor:
    """Return the rows of a DTensor in the order of the sequence, replicated: the inverse of `dispatch`.

    Args:
        x: [total_tokens, ...], Shard(0) over `mesh_dim`, in dispatched order; over other dimensions of its mesh,
            sharded along any other dimension than the rows, or replicated.
        plan, mesh_dim: as given to `dispatch`.

    Returns:
        [total_tokens, ...], replicated over `mesh_dim`.

    Raises:
        TypeError: if `x` is not a DTensor or `plan` not an AttnPlan.
        ValueError: if `x` is placed otherwise, or for a plan for another number of ranks or rows.

    Example: as `dispatch`; `undispatch(dispatch(x, plan), plan)` is `x`.
    """
    check_plan(plan)
    cp_dim = _cp_dim(x, plan, mesh_dim)
    mesh = x.device_mesh
    if mesh.size(cp_dim) > 1 and sharded_along(mesh, x.placements, 0) != [cp_dim]:
        raise ValueError(
            f"x must be sharded along its rows, Shard(0), over {name_of(mesh, cp_dim)} and no other, got placements "
            f"{list(x.placements)}"
        )
    whole = undispatch_local(x.to_local(), plan, mesh.get_group(cp_dim))
    placements = list(x.placements)
    placements[cp_dim] = Replicate()
    return DTensor.from_local(whole, mesh, placements, run_check=False, shape=x.shape, stride=_stride(x.shape))


def _cp_dim(x: DTensor, plan: AttnPlan, mesh_dim: str | int) -> int:
    """Return the dimension of the mesh as an index."""
    if not isinstance(x, DTensor):
        raise TypeError(f"x must be a DTensor, got {type(x).__name__}; local tensors go to torch_magi.dispatch")
    mesh = x.device_mesh
    names = mesh.mesh_dim_names or ()
    cp_dim = mesh_dim
    if isinstance(cp_dim, str):
        if cp_dim not in names:
            raise ValueError(f"mesh_dim must be a dimension of the mesh of x, {names or mesh.ndim}, got {mesh_dim!r}")
        cp_dim = names.index(cp_dim)
    if mesh.size(cp_dim) != plan.cp_size:
        raise ValueError(
            f"the plan is for cp_size={plan.cp_size} ranks, but {name_of(mesh, cp_dim)} has {mesh.size(cp_dim)}"
        )
    return cp_dim


def _check_even(plan: AttnPlan) -> None:
    total, ranks = plan.dispatch.total_tokens, plan.cp_size
    rows = -(-total // ranks)
    chunks = [min(max(total - r * rows, 0), rows) for r in range(ranks)]
    if list(plan.dispatch.tokens_per_rank) != chunks:
        raise ValueError(
            f"the plan gives the ranks {list(plan.dispatch.tokens_per_rank)} rows, but Shard(0) would give them "
            f"{chunks}; choose a chunk_size that divides their share, pad the sequence, or dispatch local tensors with "
            "torch_magi.dispatch"
        )


def _stride(shape: torch.Size) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
