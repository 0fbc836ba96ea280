"""Attention on DTensors: heads, rows and sinks sharded over processes, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import torch_magi as magi
from torch_magi import masks
from torch_magi.masks import AttnMask
from torch_magi.testing import random_inputs, run_ranks

Tensor = torch.Tensor
MASK = masks.document([0, 5, 16])
HEADS, DIM = (4, 2), 8
REQUEST = magi.AuxRequest(lse=True, max_logits=True)


def _tensors(mask: AttnMask = MASK, heads: tuple[int, int] = HEADS) -> list[Tensor]:
    """Return query, key, value and sink."""
    x = random_inputs(mask, *heads, DIM, dtype=torch.float64, seed=0)
    sink = torch.randn(3, heads[0], generator=torch.Generator().manual_seed(1))
    return [x.query, x.key, x.value, sink]


def _run(attend: Any, tensors: list[Tensor]) -> list[Tensor]:
    """Return out, lse, max_logits and the gradients of query, key, value and sink."""
    q, k, v, sink = (x.detach().requires_grad_() for x in tensors)
    out, aux = attend(q, k, v, sink)
    weight = torch.arange(1, DIM + 1, dtype=out.dtype)
    if isinstance(out, _dtensor()):
        weight = _dtensor().from_local(weight, out.device_mesh, run_check=False)
    ((out * weight).square().sum() + aux.lse.sum()).backward()
    return [out, aux.lse, aux.max_logits, *(x.grad for x in (q, k, v, sink))]


def _dtensor() -> Any:
    from torch.distributed.tensor import DTensor

    return DTensor


def _expected(tensors: list[Tensor], mask: AttnMask = MASK) -> list[Tensor]:
    return _run(lambda q, k, v, s: magi.flex_flash_attn(q, k, v, mask, sink=s, return_aux=REQUEST), tensors)


def _check(found: list[Any], expected: list[Tensor]) -> None:
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.full_tensor(), y)


def _plan(rank: int, ranks: int, mask: AttnMask = MASK, heads: tuple[int, int] = HEADS, chunk: int = 2) -> Any:
    return magi.make_attn_plan(mask, *heads, DIM, dtype=torch.float64, cp_size=ranks, cp_rank=rank,
                               config=magi.PlanConfig(chunk_size=chunk))  # fmt: skip


def _tp_x_cp(rank: int, group: dist.ProcessGroup) -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "cp"))
    full = _tensors()
    expected = _expected(full)
    plan = _plan(mesh.get_local_rank("cp"), 2)
    by_heads = [distribute_tensor(x, mesh, [Shard(1), Replicate()], src_data_rank=None) for x in full]

    for call in (
        lambda *x, sink: magi.context_parallel_attn(*x, plan, None, sink=sink, return_aux=REQUEST),
        lambda *x, sink: magi.context_parallel_attn(*x, plan, mesh["cp"], sink=sink, return_aux=REQUEST),
        lambda *x, sink: magi.flex_flash_attn(*x, plan, sink=sink, return_aux=REQUEST),
    ):

        def attend(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, call: Any = call) -> Any:
            rows = [magi.tensor.dispatch(x, plan) for x in (q, k, v)]
            out, aux = call(*rows, sink=sink)
            for x in (*rows, out, aux.lse):
                assert x.placements == (Shard(1), Shard(0)), x.placements
            assert aux.max_logits.placements == (Shard(0), Replicate())
            return magi.tensor.undispatch(out, plan), aux._replace(lse=magi.tensor.undispatch(aux.lse, plan))

        found = _run(attend, by_heads)
        assert found[0].placements == (Shard(1), Replicate())
        assert found[6].placements == (Shard(1), Partial()), found[6].placements
        _check(found, expected)

    # A sink of every row is sharded like the rows.
    full[3] = torch.randn(16, 2, HEADS[0], generator=torch.Generator().manual_seed(2))
    rows = [magi.tensor.dispatch(x, plan) for x in by_heads[:3]]
    sink = distribute_tensor(full[3], mesh, [Shard(2), Replicate()], src_data_rank=None).requires_grad_()
    with torch.inference_mode():
        magi.flex_flash_attn(*rows, plan)
    out, _ = call(*rows, sink=magi.tensor.dispatch(sink, plan))
    magi.tensor.undispatch(out, plan).square().sum().backward()
    assert sink.grad.placements == (Shard(2), Partial())
    one = full[3].requires_grad_()
    magi.flex_flash_attn(*full[:3], MASK, sink=one).square().sum().backward()
    torch.testing.assert_close(sink.grad.full_tensor(), one.grad)


def test_c50_tp_x_cp() -> None:
    run_ranks(_tp_x_cp, 4, "processes")


def _by_heads(rank: int, group: dist.ProcessGroup) -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    S1, R = Shard(1), Replicate()
    # placements; how many heads; placements that are expected of the result
    for placements, heads, expected in (
        ([S1, R], (4, 2), (S1, R)),
        ([R, R], (4, 2), (R, R)),
        ([S1, S1], (8, 4), (S1, S1)),
        ([S1, S1], (4, 2), (S1, R)),  # two key heads are not for four ranks
        ([S1, R], (6, 3), (R, R)),
        ([S1, R], (3, 3), (R, R)),
        ([Shard(2), R], (4, 2), (R, R)),
    ):
        full = _tensors(heads=heads)
        tensors = [distribute_tensor(x, mesh, placements, src_data_rank=None) for x in full[:3]]
        sink_placements = [p if p == S1 else R for p in placements]
        tensors.append(distribute_tensor(full[3], mesh, sink_placements, src_data_rank=None))
        one = _plan(0, 1, heads=heads)
        for mask_or_plan in (MASK, one):
            found = _run(
                lambda q, k, v, s, m=mask_or_plan: magi.flex_flash_attn(q, k, v, m, sink=s, return_aux=REQUEST), tensors
            )
            assert found[0].placements == found[1].placements == expected, (placements, heads, found[0].placements)
            assert found[3].placements == expected and found[6].placements == expected
            _check(found, _expected(full))
        with torch.inference_mode():
            magi.flex_flash_attn(*tensors[:3], MASK)
    # What is placed otherwise follows: partial sums over another dimension, a sink that is replicated.
    full = _tensors()
    q = _dtensor().from_local(full[0] / 2, mesh, [R, Partial()], run_check=False)
    k, v = (distribute_tensor(x, mesh, [S1, R], src_data_rank=None) for x in full[1:3])
    sink = distribute_tensor(full[3], mesh, [R, R], src_data_rank=None)
    out = magi.flex_flash_attn(q, k, v, MASK, sink=sink)
    assert out.placements == (S1, R)
    torch.testing.assert_close(out.full_tensor(), _expected(full)[0])


def test_heads() -> None:
    run_ranks(_by_heads, 4, "processes")


def _refused(rank: int, group: dist.ProcessGroup) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "cp"))
    full = _tensors()
    plan, one = _plan(mesh.get_local_rank("cp"), 2), _plan(0, 1)
    S0, S1, R = Shard(0), Shard(1), Replicate()

    def place(*placements: Any, n: int = 3) -> list[Any]:
        return [distribute_tensor(x, mesh, placements, src_data_rank=None) for x in full[:n]]

    rows, heads = place(S1, S0), place(S1, R)
    flex, cp, dispatch, undispatch = (
        magi.flex_flash_attn, magi.context_parallel_attn, magi.tensor.dispatch, magi.tensor.undispatch,
    )  # fmt: skip
    uneven = magi.make_attn_plan(masks.causal(16), 4, 2, DIM, cp_size=2, config=magi.PlanConfig(chunk_size=6))
    for error, text, call in (
        (ValueError, "along dimension 0 over mesh dimension 'cp', .*MagiContextParallel", lambda: flex(*rows, MASK)),
        (ValueError, "along dimension 0 over mesh dimension 'cp', .*context_parallel_attn", lambda: flex(*rows, one)),
        (ValueError, "sharded along dimension 1 over mesh dimension 'cp'",
         lambda: flex(*[x[None].redistribute(placements=[R, S1]) for x in heads], MASK)),
        (ValueError, "cp_size=2 ranks; call context_parallel_attn", lambda: flex(*heads, plan)),
        (ValueError, r"must be sharded along its rows, Shard\(0\), over one .*Shard\(dim=1\), Shard\(dim=1\)",
         lambda: cp(*place(S1, S1), plan, None)),
        (ValueError, r"query must be sharded along its rows, Shard\(0\), over mesh dimension 'cp' and no other",
         lambda: cp(*place(S0, S1), plan, mesh["cp"])),
        (ValueError, "key must be sharded along its rows", lambda: cp(rows[0], heads[1], rows[2], plan, None)),
        (ValueError, "over one dimension of its mesh", lambda: cp(*place(S0, S0), plan, None)),
        (ValueError, "must be that of a dimension of query's mesh", lambda: cp(*rows, plan, group)),
        (ValueError, "cp_size=1 ranks, but group", lambda: cp(*rows, one, None)),
        (TypeError, "got a Tensor for key", lambda: cp(rows[0], full[1], full[2], plan, None)),
        (TypeError, "sink must be a DTensor", lambda: flex(*heads, MASK, sink=full[3])),
        (RuntimeError, "q is sharded along its rows over mesh dimension 'cp'",
         lambda: magi.ops.flex_attn_fwd(*rows, one, scale=1.0)),
        (TypeError, "x must be a DTensor", lambda: dispatch(full[0], plan)),
        (ValueError, "x must be replicated over mesh dimension 'cp'", lambda: dispatch(rows[0], plan)),
        (ValueError, "mesh_dim must be a dimension", lambda: dispatch(heads[0], plan, "dp")),
        (ValueError, "cp_size=1 ranks, but mesh dimension 'cp' has 2", lambda: dispatch(heads[0], one)),
        (ValueError, r"gives the ranks \[10, 6\] rows, but Shard\(0\)|\[6, 10\]", lambda: dispatch(heads[0], uneven)),
        (ValueError, "x must be sharded along its rows", lambda: undispatch(heads[0], plan)),
        (TypeError, "torch_magi.tensor.dispatch", lambda: magi.dispatch(heads[0], plan)),
        (TypeError, "torch_magi.tensor.undispatch", lambda: magi.undispatch(rows[0], plan, mesh["cp"])),
    ):  # fmt: skip
        with pytest.raises(error, match=text):
            call()


def test_refusals() -> None:
    run_ranks(_refused, 4, "processes")
