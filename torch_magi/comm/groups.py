"""Process groups by name: what the public functions accept, and what operators carry."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

Group = dist.ProcessGroup | DeviceMesh | str


def group_name_of(group: Group | None, cp_size: int | None) -> str:
    """Return the name of a process group of `cp_size` ranks; "" for a single rank without a group.

    Args:
        group: a ProcessGroup, a one-dimensional DeviceMesh, or the name of a group.
        cp_size: the number of ranks that the plan was made for; None: there is no plan, any number is right.

    Raises:
        TypeError: if `group` is none of these.
        ValueError: if the group has another number of ranks, or the mesh more than one dimension.
    """
    if group is None:
        if cp_size is None or cp_size == 1:
            return ""
        raise TypeError(f"group must be given: the plan is for cp_size={cp_size} ranks, got None")
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"a DeviceMesh must be one-dimensional, got dimensions {group.mesh_dim_names or group.ndim}; "
                "pass mesh['cp'] or the like"
            )
        group = group.get_group()
    if isinstance(group, str):
        name = group
    elif isinstance(group, dist.ProcessGroup):
        name = group.group_name
    else:
        raise TypeError(f"group must be a ProcessGroup, a DeviceMesh or a group name, got {type(group).__name__}")
    if cp_size is not None and not torch.compiler.is_compiling():
        size = resolve_group(name).size()
        if size != cp_size:
            raise ValueError(f"the plan is for cp_size={cp_size} ranks, but group {name!r} has {size}")
    return name


def resolve_group(name: str) -> dist.ProcessGroup:
    """Return the process group called `name`."""
    resolve: Any = torch._C._distributed_c10d._resolve_process_group
    group: dist.ProcessGroup = resolve(name)
    return group
