"""MagiContextParallel: how parallelize_module makes a module's attention context-parallel."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.utils import _pytree as pytree


class MagiContextParallel(ParallelStyle):
    """Share the rows of attention among the ranks of a mesh, for `parallelize_module`.

    The module is one that calls `flex_flash_attn` (or `context_parallel_attn` with group None) with arguments of its
    forward: the query, the key, the value and a plan. It stays as it is. On several ranks each gives it the rank's own
    dispatched rows and a plan with cp_size and cp_rank; the style marks the rows as those of one sequence that the
    ranks share, as DTensors with Shard(0), by which attention finds the ranks.

    Args:
        mesh_dim: the dimension of the mesh whose ranks share the rows. A mesh with one dimension is taken as it is.
        input_names: the parameters of the module's forward that are rows: local tensors, or DTensors on a mesh with
            `mesh_dim`, Shard(0) over it, in dispatched order.
        use_local_output: return the module's results as local tensors; otherwise as DTensors, which are right only
            where all ranks have as many rows.

    Raises:
        ValueError: when it is applied, if the mesh has no such dimension, or the module's forward no such parameters.

    Example:
        >>> import torch, torch_magi as magi
        >>> from torch.distributed.tensor import init_device_mesh
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> class Attention(torch.nn.Module):
        ...     def forward(self, query, key, value, plan):
        ...         return magi.flex_flash_attn(query, key, value, plan)
        >>> def attend(rank, group):
        ...     mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        ...     attention = parallelize_module(Attention(), mesh, magi.tensor.MagiContextParallel())
        ...     plan = magi.make_attn_plan(magi.masks.causal(8), 2, 1, 8, dtype=torch.float32, cp_size=2, cp_rank=rank)
        ...     q, k, v = (torch.randn(plan.num_tokens_local, heads, 8) for heads in (2, 1, 1))
        ...     return attention(q, k, v, plan).shape
        >>> from torch_magi.testing import run_ranks
        >>> run_ranks(attend, 2)
        [torch.Size([4, 2, 8]), torch.Size([4, 2, 8])]
    """

    def __init__(
        self,
        *,
        mesh_dim: str = "cp",
        input_names: Sequence[str] = ("query", "key", "value"),
        use_local_output: bool = True,
    ) -> None:
        super().__init__()
        self.mesh_dim = mesh_dim
        self.input_names = tuple(input_names)
        self.use_local_output = use_local_output

    def __repr__(self) -> str:
        return (
            f"MagiContextParallel(mesh_dim={self.mesh_dim!r}, input_names={self.input_names}, "
            f"use_local_output={self.use_local_output})"
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mesh = device_mesh
        if mesh.ndim != 1:
            names = mesh.mesh_dim_names or ()
            if self.mesh_dim not in names:
                raise ValueError(f"the mesh must have a dimension {self.mesh_dim!r}, got {names or mesh.ndim}")
            mesh = mesh[self.mesh_dim]
        parameters = list(inspect.signature(module.forward).parameters)
        for name in self.input_names:
            if name not in parameters:
                raise ValueError(
                    f"input_names must be parameters of {type(module).__name__}.forward, {parameters}, got {name!r}"
                )
        positions = {parameters.index(name): name for name in self.input_names}

        def mark_inputs(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            marked = [self._rows(x, positions[i], mesh) if i in positions else x for i, x in enumerate(args)]
            return tuple(marked), {
                name: self._rows(x, name, mesh) if name in self.input_names else x for name, x in kwargs.items()
            }

        module.register_forward_pre_hook(mark_inputs, with_kwargs=True)
        if self.use_local_output:
            module.register_forward_hook(lambda _, inputs, outputs: pytree.tree_map_only(DTensor, _local, outputs))
        return module

    def _rows(self, x: Any, name: str, mesh: DeviceMesh) -> DTensor:
        if isinstance(x, DTensor):
            if x.device_mesh != mesh and self.mesh_dim not in (x.device_mesh.mesh_dim_names or ()):
                raise ValueError(
                    f"{name} must be local rows, or a DTensor on a mesh with a dimension {self.mesh_dim!r}, got a "
                    f"DTensor on {x.device_mesh}; pass {name}.to_local()"
                )
            return x
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        return DTensor.from_local(x, mesh, [Shard(0)], run_check=False)


def _local(x: DTensor) -> torch.Tensor:
    return x.to_local()
