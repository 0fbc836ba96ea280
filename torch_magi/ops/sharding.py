"""How the operators run on DTensors: along which dimensions they may be sharded, and how their results are then.

    flex_attn_fwd, flex_attn_bwd    heads, where every rank gets whole groups of query heads with their key heads
    merge_state                     rows and heads
    range_gather, range_scatter_add every dimension but the rows

Everything else is replicated first, as is usual with DTensors: on a dimension of the mesh along which no input is
sharded in one of these ways, inputs that are something else (partial sums) are gathered. Rows of attention and of
ranges are an error instead: gathering them would undo what the sharding is for.

Importing this module registers the rules with torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, RuntimeSchemaInfo
from torch.distributed.tensor._ops.utils import generate_redistribute_costs, register_op_strategy
from torch.distributed.tensor.placement_types import Placement

_ops = torch.ops.torch_magi
Specs = Sequence[DTensorSpec | None]
# For every tensor: None, or the dimension that is sharded where heads (or the like) are.
Dims = Sequence[int | None]

ROWS_SHARDED = (
    "rows of a sequence that is shared by ranks are computed through a plan: make_attn_plan(..., cp_size, cp_rank), "
    "torch_magi.tensor.dispatch, and context_parallel_attn or MagiContextParallel"
)


def sharded_along(mesh: DeviceMesh, placements: Sequence[Placement], dim: int) -> list[int]:
    """Return the dimensions of the mesh, of more than one rank, over which a tensor is sharded along `dim`."""
    return [i for i, p in enumerate(placements) if p.is_shard(dim) and mesh.size(i) > 1]


def name_of(mesh: DeviceMesh, mesh_dim: int) -> str:
    """Return how an error names a dimension of the mesh."""
    names = mesh.mesh_dim_names
    return f"mesh dimension {names[mesh_dim]!r}" if names else f"mesh dimension {mesh_dim}"


def head_dims(mesh: DeviceMesh, placements: Sequence[Sequence[Placement]], heads: Sequence[int]) -> list[int]:
    """Return the dimensions of the mesh over which heads are sharded: where one of the tensors is, if all can be.

    Args:
        mesh: of all tensors.
        placements: of tensors whose dimension 1 are heads.
        heads: how many heads each has. All are multiples of the number of ranks of the dimensions returned: a rank's
            query heads then need only the rank's key heads.
    """
    found, ranks = [], 1
    for i in range(mesh.ndim):
        here = any(i in sharded_along(mesh, p, 1) for p in placements)
        if here and all(n % (ranks * mesh.size(i)) == 0 for n in heads):
            found.append(i)
            ranks *= mesh.size(i)
    return found


def _refuse_sharded_rows(name: str, spec: DTensorSpec, what_to_do: str) -> None:
    for i in sharded_along(spec.mesh, spec.placements, 0):
        raise ValueError(f"{name} is sharded along its rows over {name_of(spec.mesh, i)}; {what_to_do}")


def _strategy(schema: OpSchema, inputs: Specs, placements: Sequence[Sequence[Placement]], n_out: int) -> OpStrategy:
    """Return the one way to run: `placements` of the results, then of the inputs that are there."""
    mesh = next(s for s in inputs if s is not None).mesh
    specs = [DTensorSpec(mesh, tuple(p)) for p in placements]
    outputs, wanted = specs[:n_out], specs[n_out:]
    metas = [s.tensor_meta for s in inputs if s is not None]
    wanted = [s.shallow_copy_with_tensor_meta(meta) for s, meta in zip(wanted, metas, strict=True)]
    costs = [generate_redistribute_costs(s, w) for s, w in zip(schema.args_strategy, wanted, strict=True)]
    return OpStrategy([OpSpec(outputs[0] if n_out == 1 else tuple(outputs), wanted, costs)])


def _specs_of(schema: OpSchema, positions: Sequence[int]) -> list[DTensorSpec | None]:
    """Return the specs of the tensors at these positions of the arguments; None for an absent one."""
    arguments = [schema.args_schema[i] for i in positions]
    return [a.strategies[0].output_spec if isinstance(a, OpStrategy) else None for a in arguments]


def _by_heads(schema: OpSchema, inputs: Specs, qkv: Sequence[DTensorSpec], dims: Dims, outputs: Dims) -> OpStrategy:
    """Shard `dims` of the inputs and `outputs` of the results where q, k or v have their heads sharded."""
    mesh = qkv[0].mesh
    sharded = head_dims(mesh, [spec.placements for spec in qkv], [spec.shape[1] for spec in qkv])

    def placements(dim: int | None) -> list[Placement]:
        return [Shard(dim) if dim is not None and i in sharded else Replicate() for i in range(mesh.ndim)]

    wanted = [placements(dim) for dim, spec in zip(dims, inputs, strict=True) if spec is not None]
    return _strategy(schema, inputs, [*map(placements, outputs), *wanted], len(outputs))


def _sink_dim(sink: DTensorSpec | None) -> int | None:
    return None if sink is None else sink.ndim - 1


def _attn_fwd(schema: OpSchema) -> OpStrategy:
    inputs = _specs_of(schema, (0, 1, 2, 5, 6, 7))
    q, k, v, sink, *_ = inputs
    assert q is not None and k is not None and v is not None
    for name, spec in (("q", q), ("k", k), ("v", v)):
        _refuse_sharded_rows(name, spec, ROWS_SHARDED)
    return_max_logits = schema.args_schema[11]
    dims = (1, 1, 1, _sink_dim(sink), 1, 1)
    return _by_heads(schema, inputs, (q, k, v), dims, (1, 1, 0 if return_max_logits else None))


def _attn_bwd(schema: OpSchema) -> OpStrategy:
    inputs = _specs_of(schema, (0, 1, 2, 3, 4, 5, 6, 7, 10))
    q, k, v, sink = inputs[2], inputs[3], inputs[4], inputs[8]
    assert q is not None and k is not None and v is not None
    dims = (1,) * 8 + (_sink_dim(sink),)
    return _by_heads(schema, inputs, (q, k, v), dims, (1, 1, 1, _sink_dim(sink)))


def _merge(schema: OpSchema) -> OpStrategy:
    inputs = _specs_of(schema, range(4))
    specs = [s for s in inputs if s is not None]
    mesh = specs[0].mesh

    def along(i: int) -> Placement:
        dims = (dim for s in specs for dim in (0, 1) if i in sharded_along(mesh, s.placements, dim))
        dim = next(dims, None)
        return Replicate() if dim is None else Shard(dim)

    placements = [along(i) for i in range(mesh.ndim)]
    return _strategy(schema, inputs, [placements] * 6, 2)


def _ranges(name: str, schema: OpSchema) -> OpStrategy:
    inputs = _specs_of(schema, (0, 1))
    x, ranges = inputs
    assert x is not None and ranges is not None
    _refuse_sharded_rows(name, x, "ranges are of the rows of one rank; use group_cast and group_reduce across ranks")
    placements = [p if type(p) is Shard else Replicate() for p in x.placements]
    return _strategy(schema, inputs, [placements, placements, [Replicate()] * x.mesh.ndim], 1)


_RULES: list[tuple[Any, Callable[[OpSchema], OpStrategy], int]] = [
    (_ops.flex_attn_fwd.default, _attn_fwd, 4),
    (_ops.flex_attn_bwd.default, _attn_bwd, 9),
    (_ops.merge_state.default, _merge, 100),
    (_ops.range_gather.default, functools.partial(_ranges, "x"), 2),
    (_ops.range_scatter_add.default, functools.partial(_ranges, "y"), 2),
]
for _op, _rule, _first_static in _RULES:
    # The arguments from `_first_static` on that are no tensors decide about shapes and dtypes of the results.
    register_op_strategy(_op, RuntimeSchemaInfo(_first_static))(_rule)
