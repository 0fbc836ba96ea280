"""merge_state and the range operators on DTensors; attention on DTensors in compiled code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import torch_magi as magi
from torch_magi import masks
from torch_magi.ops import range_gather, range_scatter_add
from torch_magi.testing import random_inputs, run_ranks

Tensor = torch.Tensor


def _run(call: Any, inputs: list[Tensor]) -> list[Tensor]:
    """Return the results and the gradients of the inputs."""
    inputs = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    results = call(*inputs)
    results = list(results) if isinstance(results, tuple) else [results]
    sum(r.sin().sum() for r in results).backward()
    return [*results, *(x.grad for x in inputs if x.requires_grad)]


def _operators(rank: int, group: dist.ProcessGroup) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    gen = torch.Generator().manual_seed(0)
    state = [torch.randn(n, generator=gen, dtype=torch.float64) for n in ((7, 4, 8), (7, 4)) * 2]
    x, ranges = torch.randn(9, 4, 6, generator=gen, dtype=torch.float64), torch.tensor([[2, 5], [3, 9], [0, 1]])
    S, R = Shard, Replicate()
    everywhere = [R, R]
    for call, inputs, placements, expected in (
        (magi.merge_state, state, [[S(0), S(1)]] * 4, (S(0), S(1))),
        (magi.merge_state, state, [[S(0), R], everywhere, [R, S(1)], everywhere], (S(0), S(1))),
        (magi.merge_state, state, [[S(2), R], [R, R], [R, S(1)], [S(0), R]], (S(0), S(1))),
        (lambda x, r: range_gather(x, r, 10), [x, ranges], [[S(1), S(2)], everywhere], (S(1), S(2))),
        (lambda x, r: range_gather(x, r, 10), [x, ranges], [everywhere, everywhere], (R, R)),
        (lambda x, r: range_scatter_add(range_gather(x, r, 10), r, 9), [x, ranges], [[R, S(1)], everywhere], (R, S(1))),
    ):
        placed = [distribute_tensor(t, mesh, p, src_data_rank=None) for t, p in zip(inputs, placements, strict=True)]
        found = _run(call, placed)
        assert found[0].placements == expected
        for a, b in zip(found, _run(call, inputs), strict=True):
            torch.testing.assert_close(a.full_tensor(), b)
    rows, r = (distribute_tensor(t, mesh, [p, R], src_data_rank=None) for t, p in ((x, S(0)), (ranges, R)))
    with pytest.raises(RuntimeError, match=r"x is sharded along its rows over mesh dimension 'a'; .*group_cast"):
        range_gather(rows, r, 10)
    with pytest.raises(RuntimeError, match="y is sharded along its rows"):
        range_scatter_add(rows, r, 10)


def test_operators() -> None:
    run_ranks(_operators, 4, "processes")


def _compiled(rank: int, group: dist.ProcessGroup, backend: str) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("cp", "tp"))
    S0, S1, R = Shard(0), Shard(1), Replicate()
    for rows, placements in ((False, [S1, R]), (True, [S0, S1])):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()

        def attend(q: Tensor, k: Tensor, v: Tensor, plan: Any) -> Any:
            return magi.flex_flash_attn(q, k, v, plan)

        compiled = torch.compile(attend, fullgraph=True, backend=backend)
        for documents in ([0, 5, 16], [0, 20], [0, 9, 24]):
            x = random_inputs(masks.document(documents), 4, 2, 8, dtype=torch.float64, seed=0)
            plan = magi.make_attn_plan(masks.document(documents), 4, 2, 8, dtype=torch.float64,
                                       cp_size=2 if rows else 1, cp_rank=rank if rows else 0,
                                       config=magi.PlanConfig(chunk_size=2))  # fmt: skip
            inputs = [distribute_tensor(t, mesh, placements, src_data_rank=None) for t in (x.query, x.key, x.value)]
            found = _run(lambda *qkv, plan=plan, run=compiled: run(*qkv, plan), inputs)
            expected = _run(lambda *qkv, plan=plan: attend(*qkv, plan), inputs)
            for a, b in zip(found, expected, strict=True):
                assert a.placements == b.placements
                torch.testing.assert_close(a.to_local(), b.to_local())
        # One of the first length, one of all others.
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_compiled() -> None:
    run_ranks(_compiled, 2, "processes", ("aot_eager",))
