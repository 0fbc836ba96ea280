"""The attention functions on DTensors: who holds which rows and heads, and the way to the local tensors and back."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from torch_magi.attention.options import AuxOutput
from torch_magi.comm.groups import Group, group_name_of
from torch_magi.ops.sharding import ROWS_SHARDED, head_dims, name_of, sharded_along

Tensor = torch.Tensor


def check_dtensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise TypeError or ValueError if not all three are DTensors, or not on one mesh."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, DTensor):
            raise TypeError(
                f"query, key and value must be DTensors, or none of them and not sink, got a {type(x).__name__} for "
                f"{name}; see DTensor.from_local and to_local"
            )
        assert isinstance(query, DTensor)
        if x.device_mesh != query.device_mesh:
            raise ValueError(
                f"query, key and value must be on one mesh, got {query.device_mesh} and, for {name}, {x.device_mesh}"
            )


def rows_are_sharded(query: Tensor) -> bool:
    """Return whether the rows, or the elements of a batch, of a DTensor are shared by ranks."""
    assert isinstance(query, DTensor)
    return any(sharded_along(query.device_mesh, query.placements, dim) for dim in range(query.ndim - 2))


def check_whole(query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None) -> None:
    """Raise ValueError or TypeError if DTensors do not fit a mask, or a plan for one rank, of all rows."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        assert isinstance(x, DTensor)
        mesh = x.device_mesh
        for dim in range(x.ndim - 2):
            for i in sharded_along(mesh, x.placements, dim):
                raise ValueError(
                    f"{name} {list(x.shape)} is sharded along dimension {dim} over {name_of(mesh, i)}, but the mask or "
                    f"plan is not one for its {mesh.size(i)} ranks; {ROWS_SHARDED}"
                )
    if sink is not None and not isinstance(sink, DTensor):
        raise TypeError(
            "sink must be a DTensor as query is, got a Tensor; see torch.distributed.tensor.distribute_tensor"
        )


class RowSharding(NamedTuple):
    """The rows of a sequence are shared by the ranks of one dimension of a mesh, heads perhaps by those of others."""

    mesh: DeviceMesh
    cp_dim: int
    heads_over: tuple[int, ...]  # dimensions of the mesh

    @property
    def group_name(self) -> str:
        """The name of the group of the ranks that share the rows."""
        return group_name_of(self.mesh.get_group(self.cp_dim))

    def placements(self, rows: int | None, heads: int | None) -> list[Placement]:
        """Return how a tensor is placed whose rows and heads, if it has any, are these dimensions."""
        found: list[Placement] = [Replicate()] * self.mesh.ndim
        if rows is not None:
            found[self.cp_dim] = Shard(rows)
        if heads is not None:
            for i in self.heads_over:
                found[i] = Shard(heads)
        return found

    def to_local(self, x: Tensor) -> Tensor:
        """Return this rank's rows and heads of query, key or value."""
        assert isinstance(x, DTensor)
        return _redistributed(x, self.placements(0, 1)).to_local()

    def sink_to_local(self, sink: Tensor | None) -> Tensor | None:
        """Return the sink of this rank's heads (and rows); every other tensor is taken to be that already.

        The gradient of a sink that rows share is a partial sum on every rank.
        """
        if not isinstance(sink, DTensor):
            return sink
        if sink.device_mesh != self.mesh:  # for example that of tensor parallelism alone
            return sink.to_local()
        placements = self.placements(0 if sink.ndim == 3 else None, sink.ndim - 1)
        grads = list(placements)
        if sink.ndim == 2:
            grads[self.cp_dim] = Partial()
        return _redistributed(sink, placements).to_local(grad_placements=grads)

    def wrap(self, x: Tensor, like: Tensor, rows: int | None, heads: int) -> Tensor:
        """Return a local result as a DTensor with as many rows and heads as `like`, a query."""
        shape = list(x.shape)
        shape[heads] = like.shape[1]
        if rows is not None:
            shape[rows] = like.shape[0]
        stride = [1]
        for n in reversed(shape[1:]):
            stride.insert(0, stride[0] * n)
        return DTensor.from_local(
            x, self.mesh, self.placements(rows, heads), run_check=False, shape=torch.Size(shape), stride=tuple(stride)
        )

    def wrap_all(self, result: Tensor | tuple[Tensor, AuxOutput], query: Tensor) -> Tensor | tuple[Tensor, AuxOutput]:
        """Return what context_parallel_attn returned for local tensors, as DTensors."""
        if isinstance(result, Tensor):
            return self.wrap(result, query, 0, 1)
        out, aux = result
        lse = None if aux.lse is None else self.wrap(aux.lse, query, 0, 1)
        max_logits = None if aux.max_logits is None else self.wrap(aux.max_logits, query, None, 0)
        return self.wrap(out, query, 0, 1), AuxOutput(lse, max_logits)


def _redistributed(x: DTensor, placements: list[Placement]) -> DTensor:
    return x if list(x.placements) == placements else x.redistribute(placements=placements)


def row_sharding_of(query: Tensor, key: Tensor, value: Tensor, group: Group | None) -> RowSharding:
    """Return how rows and heads are sharded, for context parallelism.

    Args:
        query, key, value: DTensors [rows, heads, head_dim] whose rows are sharded over one dimension of their mesh,
            in dispatched order. Heads may be sharded over others.
        group: that of the dimension; None: the one over which the rows of query are.

    Raises:
        TypeError, ValueError: where they are placed otherwise.
    """
    check_dtensors(query, key, value)
    assert isinstance(query, DTensor) and isinstance(key, DTensor) and isinstance(value, DTensor)
    if query.ndim != 3:
        raise ValueError(
            f"query, key and value must be dispatched rows [rows, heads, head_dim], got {list(query.shape)}"
        )
    mesh = query.device_mesh
    if group is None:
        found = sharded_along(mesh, query.placements, 0)
        if len(found) != 1:
            raise ValueError(
                "query must be sharded along its rows, Shard(0), over one dimension of its mesh, got placements "
                f"{list(query.placements)}; {ROWS_SHARDED}"
            )
        cp_dim = found[0]
    else:
        name = group_name_of(group)
        named = [i for i in range(mesh.ndim) if group_name_of(mesh.get_group(i)) == name]
        if not named:
            raise ValueError(f"group {name!r} must be that of a dimension of query's mesh, got {mesh}")
        cp_dim = named[0]
    for what, x in (("query", query), ("key", key), ("value", value)):
        if mesh.size(cp_dim) > 1 and sharded_along(mesh, x.placements, 0) != [cp_dim]:
            raise ValueError(
                f"{what} must be sharded along its rows, Shard(0), over {name_of(mesh, cp_dim)} and no other, got "
                f"placements {list(x.placements)}; {ROWS_SHARDED}"
            )
    heads = [query.shape[1], key.shape[1], value.shape[1]]
    over = head_dims(mesh, [query.placements, key.placements, value.placements], heads)
    return RowSharding(mesh, cp_dim, tuple(i for i in over if i != cp_dim))
