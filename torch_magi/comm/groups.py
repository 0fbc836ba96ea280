"""Process groups by name: what the public functions accept, and what operators carry."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torch_magi.plan import AttnPlan, CommPlan

Group = dist.ProcessGroup | DeviceMesh | str


LEVELS = "|"  # between the names of the groups of a mesh of nodes: "between nodes|within the node"


def group_name_of(group: Group | None, plan: AttnPlan | CommPlan | None = None, *, nodes: bool = False) -> str:
    """Return the name of a process group; "" for a single rank without a group.

    Args:
        group: a ProcessGroup, a one-dimensional DeviceMesh, or the name of a group.
        plan: what is to be done in the group.
        nodes: also take a DeviceMesh of shape (nodes, ranks per node). The result then names two groups.

    Raises:
        TypeError: if `group` is none of these.
        ValueError: if the plan is for another rank or number of ranks, or the mesh has more than one dimension.
    """
    cp_size = 1 if plan is None else plan.size if isinstance(plan, CommPlan) else plan.cp_size
    if group is None:
        if cp_size == 1:
            return ""
        raise TypeError(f"group must be given: the plan is for cp_size={cp_size} ranks, got None")
    if isinstance(group, DeviceMesh):
        if group.ndim == 2 and nodes:
            group = LEVELS.join(group.get_group(dim).group_name for dim in range(2))
        elif group.ndim != 1:
            raise ValueError(
                f"a DeviceMesh must be one-dimensional, got dimensions {group.mesh_dim_names or group.ndim}; "
                "pass mesh['cp'] or the like"
            )
        else:
            group = group.get_group()
    if isinstance(group, str):
        name = group
    elif isinstance(group, dist.ProcessGroup):
        name = group.group_name
    else:
        raise TypeError(f"group must be a ProcessGroup, a DeviceMesh or a group name, got {type(group).__name__}")
    if plan is not None and not torch.compiler.is_compiling():
        levels = [resolve_group(level) for level in name.split(LEVELS)]
        size = math.prod(level.size() for level in levels)
        if size != cp_size:
            raise ValueError(f"the plan is for cp_size={cp_size} ranks, but group {name!r} has {size}")
        rank = plan.rank if isinstance(plan, CommPlan) else plan.cp_rank
        if len(levels) == 1 and levels[0].rank() != rank:
            raise ValueError(
                f"the plan is for rank {rank}, but this is rank {levels[0].rank()} of group {name!r}; each rank needs "
                "its own part"
            )
    return name


def check_levels(comm: CommPlan, name: str) -> None:
    """Raise ValueError if one or two groups are named where the plan has two steps or one, or others than it has."""
    if comm.intra is None:
        if LEVELS in name:
            raise ValueError(
                "a DeviceMesh must be one-dimensional for a plan without ranks_per_node, got a two-dimensional one; "
                "pass mesh['cp'] or the like"
            )
        return
    if LEVELS not in name:
        raise ValueError(
            f"a plan with ranks_per_node needs a DeviceMesh of shape (nodes, ranks_per_node), got the group {name!r}"
        )
    inter, intra = (resolve_group(level) for level in name.split(LEVELS))
    found = inter.size(), intra.size(), inter.rank() * intra.size() + intra.rank()
    wanted = comm.size // comm.intra.size, comm.intra.size, comm.rank
    if found != wanted:
        raise ValueError(
            f"the plan is for rank {wanted[2]} of a mesh of shape {wanted[:2]} (nodes, ranks per node), node by node, "
            f"got rank {found[2]} of one of shape {found[:2]}"
        )


def resolve_group(name: str) -> dist.ProcessGroup:
    """Return the process group called `name`."""
    resolve: Any = torch._C._distributed_c10d._resolve_process_group
    group: dist.ProcessGroup = resolve(name)
    return group
