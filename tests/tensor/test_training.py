"""Two steps of training over tensor, context and data parallelism: losses and gradients are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import torch_magi as magi
from torch_magi import masks
from torch_magi.testing import run_ranks

Tensor = torch.Tensor
WIDTH, HEADS, KV_HEADS, DIM = 16, 4, 2, 8
# Documents of each of the two sequences. The first gives its ranks other numbers of rows.
DOCUMENTS = ([0, 5, 13], [0, 9, 16])
CONFIG = magi.PlanConfig(chunk_size=2)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sink = nn.Parameter(torch.randn(4, HEADS, dtype=torch.float64))  # FSDP wants one dtype

    def forward(self, query: Tensor, key: Tensor, value: Tensor, plan: magi.AttnPlan) -> Tensor:
        out = magi.flex_flash_attn(query, key, value, plan, sink=self.sink.float())
        assert isinstance(out, Tensor)
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        double = {"dtype": torch.float64}
        self.norm = nn.LayerNorm(WIDTH, **double)
        self.query = nn.Linear(WIDTH, HEADS * DIM, **double)
        self.key = nn.Linear(WIDTH, KV_HEADS * DIM, **double)
        self.value = nn.Linear(WIDTH, KV_HEADS * DIM, **double)
        self.attention = Attention()
        self.out = nn.Linear(HEADS * DIM, WIDTH, **double)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, **double)
        self.down = nn.Linear(2 * WIDTH, WIDTH, **double)

    def forward(self, x: Tensor, plan: magi.AttnPlan) -> Tensor:
        y = self.norm(x)
        q, k, v = (f(y).unflatten(1, (-1, DIM)) for f in (self.query, self.key, self.value))
        x = x + self.out(self.attention(q, k, v, plan).flatten(1))
        return x + self.down(F.gelu(self.up(x)))


def _plan(sequence: int, ranks: int = 1, rank: int = 0) -> magi.AttnPlan:
    mask = masks.document(DOCUMENTS[sequence])
    return magi.make_attn_plan(
        mask, HEADS, KV_HEADS, DIM, dtype=torch.float64, cp_size=ranks, cp_rank=rank, config=CONFIG
    )


def _data(sequence: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets."""
    generator = torch.Generator().manual_seed(sequence)
    x, y = torch.randn(2, DOCUMENTS[sequence][-1], WIDTH, dtype=torch.float64, generator=generator)
    return x, y


def _block() -> Block:
    torch.manual_seed(0)
    return Block()


def _one_process(sequences: int) -> list[dict[str, Tensor]]:
    """Return, for each step, the loss and the gradients by name."""
    block, steps = _block(), []
    optimizer = torch.optim.SGD(block.parameters(), lr=0.3)
    for _ in range(2):
        optimizer.zero_grad()
        total = sum((block(x, _plan(s)) - y).square().sum() for s in range(sequences) for x, y in [_data(s)])
        loss = total / sum(DOCUMENTS[s][-1] for s in range(sequences))
        loss.backward()
        steps.append({"loss": loss.detach(), **{n: p.grad.clone() for n, p in block.named_parameters()}})
        optimizer.step()
    return steps


def _parallelize(block: Block, mesh: Any, fsdp: bool) -> Any:
    """Return the mesh of the ranks that hold other rows: those over which gradients are summed."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if mesh["tp"].size() > 1:
        columns, rows = ("query", "key", "value", "up"), ("out", "down")
        parallelize_module(
            block, mesh["tp"], {**{n: ColwiseParallel() for n in columns}, **{n: RowwiseParallel() for n in rows}}
        )
        block.attention.sink = nn.Parameter(distribute_tensor(block.attention.sink.detach(), mesh["tp"], [Shard(1)]))
    parallelize_module(block, mesh["cp"], {"attention": magi.tensor.MagiContextParallel()})
    if not fsdp:
        return mesh["cp"]
    rows = mesh["dp", "cp"]._flatten("dp_cp")
    fully_shard(block, mesh=rows)
    return rows


def _train(rank: int, group: dist.ProcessGroup, shape: tuple[int, int, int], fsdp: bool) -> list[dict[str, Tensor]]:
    from torch.distributed.tensor import DTensor, init_device_mesh

    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp", "tp"))
    block, steps = _block(), []
    ranks = _parallelize(block, mesh, fsdp).get_group()
    optimizer = torch.optim.SGD(block.parameters(), lr=0.3)
    sequence = mesh.get_local_rank("dp")
    plan = _plan(sequence, shape[1], mesh.get_local_rank("cp"))
    x, y = (magi.dispatch(t, plan) for t in _data(sequence))
    for _ in range(2):
        optimizer.zero_grad()
        loss_sum = (block(x, plan) - y).square().sum()
        loss = magi.cp_mean_loss(loss_sum, len(x), ranks, grad_reduction="mean" if fsdp else "sum")
        loss.backward()
        found = {"loss": loss.detach()}
        for name, p in block.named_parameters():
            if not fsdp:
                dist.all_reduce(p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad, group=ranks)
            found[name] = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad.clone()
        steps.append(found)
        optimizer.step()
    return steps


@pytest.mark.parametrize(("shape", "fsdp"), [
    ((2, 2, 2), True),
    ((2, 2, 1), True),
    ((1, 2, 2), False),
], ids=["tp_x_cp_x_fsdp", "cp_x_fsdp", "tp_x_cp"])  # fmt: skip
def test_two_steps(shape: tuple[int, int, int], fsdp: bool) -> None:
    expected = _one_process(shape[0])
    assert expected[1]["loss"] < expected[0]["loss"]
    world = shape[0] * shape[1] * shape[2]
    for steps in run_ranks(_train, world, "processes", (shape, fsdp)):
        for found, step in zip(steps, expected, strict=True):
            assert found.keys() == step.keys()
            for name, value in step.items():
                # The sinks of attention, and their gradients, are float32.
                torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
