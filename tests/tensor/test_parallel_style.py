"""MagiContextParallel on modules that call attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_magi as magi
from torch_magi import masks
from torch_magi.testing import random_inputs, run_ranks, run_reference

Tensor = torch.Tensor
MASK = masks.document([0, 5, 16])


class Attention(nn.Module):
    def forward(self, x: Tensor, q: Tensor, kv: tuple[int, int], *, k: Tensor, v: Tensor, plan: Any) -> Any:
        assert not isinstance(x, _dtensor()) and kv == (1, 2)
        return magi.flex_flash_attn(q, k, v, plan, return_aux=magi.AuxRequest(lse=True))


def _dtensor() -> Any:
    from torch.distributed.tensor import DTensor

    return DTensor


def _styles(rank: int, group: dist.ProcessGroup) -> None:
    from torch.distributed.tensor import Shard, init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "cp"))
    names = ("q", "k", "v")
    x = random_inputs(MASK, dtype=torch.float64, seed=0)
    expected = run_reference(x.query, x.key, x.value, MASK, dout=x.dout)
    plan = magi.make_attn_plan(MASK, 2, 1, 8, dtype=torch.float64, cp_size=2, cp_rank=mesh.get_local_rank("cp"),
                               config=magi.PlanConfig(chunk_size=2))  # fmt: skip
    rows = plan.position_ids
    q, k, v, dout = (magi.dispatch(t, plan) for t in (x.query, x.key, x.value, x.dout))
    q.requires_grad_()
    placed = _dtensor().from_local(q, mesh["cp"], [Shard(0)])

    one = magi.tensor.MagiContextParallel(input_names=names)
    for apply in (lambda m: parallelize_module(m, mesh["cp"], one), lambda m: one._apply(m, mesh)):
        for query in (q, placed):
            out, aux = apply(Attention())(q, query, (1, 2), k=k, v=v, plan=plan)
            assert type(out) is type(aux.lse) is Tensor
            torch.testing.assert_close(out, expected.out[rows])
            torch.testing.assert_close(aux.lse, expected.lse[rows])
            q.grad = None
            out.backward(dout)
            torch.testing.assert_close(q.grad, expected.dq[rows])

    kept = magi.tensor.MagiContextParallel(input_names=names, use_local_output=False)
    out, aux = parallelize_module(Attention(), mesh["cp"], kept)(q, q, (1, 2), k=k, v=v, plan=plan)
    assert out.placements == aux.lse.placements == (Shard(0),) and out.device_mesh == mesh["cp"]
    assert out.shape == (16, 2, 8) and aux.lse.shape == (16, 2)

    with pytest.raises(ValueError, match=r"parameters of Attention.forward, \['x', 'q', .*got 'query'"):
        parallelize_module(Attention(), mesh["cp"], magi.tensor.MagiContextParallel())
    with pytest.raises(ValueError, match=r"must have a dimension 'dp', got \('tp', 'cp'\)"):
        magi.tensor.MagiContextParallel(mesh_dim="dp")._apply(Attention(), mesh)
    module = parallelize_module(Attention(), mesh["cp"], one)
    with pytest.raises(TypeError, match="k must be a tensor, got NoneType"):
        module(q, q, (1, 2), k=None, v=v, plan=plan)
    with pytest.raises(ValueError, match="q must be local rows, or a DTensor on a mesh with a dimension 'cp'"):
        module(q, _dtensor().from_local(q, mesh["tp"], [Shard(1)]), (1, 2), k=k, v=v, plan=plan)
    with pytest.raises(ValueError, match="the mask or plan is not one for its 2 ranks"):
        module(q, q, (1, 2), k=k, v=v, plan=MASK)
    assert "mesh_dim='cp'" in repr(one)


def test_styles() -> None:
    run_ranks(_styles, 4, "processes")


def test_is_imported_on_first_use() -> None:
    assert magi.tensor.MagiContextParallel.__doc__
    with pytest.raises(AttributeError, match="no attribute 'tensors'"):
        magi.tensors  # noqa: B018
