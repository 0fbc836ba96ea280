"""Rows that ranks copy out of each other's memory: which ones, in which order. On GPUs: tests/gpu/test_transport.py."""

from __future__ import annotations

import math
import pickle
import threading
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torch_magi as magi
from torch_magi import AttnPlan, CommPlan, PlanConfig, masks
from torch_magi.comm import exchange, symmetric
from torch_magi.masks import AttnMask
from torch_magi.plan.types import Move
from torch_magi.testing import (
    check_attention,
    context_parallel_runner,
    named_masks,
    random_inputs,
    random_masks,
    run_ranks,
)

SQUARE = {name: mask for name, mask in named_masks().items() if mask.shape[0] == mask.shape[1]}


class SharedMemory:
    """Memory that the threads of a test see, one piece for each: what torch's symmetric memory is to GPUs."""

    def __init__(self, world: int, size: int) -> None:
        self.pieces = [torch.full((size,), 255, dtype=torch.uint8) for _ in range(world)]
        self.met = threading.Barrier(world, timeout=20)
        self.barriers = 0

    def get_buffer(self, rank: int, sizes: Any, dtype: torch.dtype) -> Tensor:
        count = math.prod(sizes)
        return self.pieces[rank][: count * dtype.itemsize].view(dtype).view(sizes)

    def barrier(self) -> None:
        if self.met.wait() == 0:
            self.barriers += 1


class Copies:
    """Takes the place of `start_copies` in the threads of a test."""

    def __init__(self, world: int) -> None:
        self.world, self.exchanges = world, 0
        self.memory: dict[int, SharedMemory] = {}
        self.lock = threading.Lock()

    def __call__(self, x: Tensor, rows: int, moves: tuple[Move, ...], comm: CommPlan, group_name: str) -> Tensor:
        assert comm.moves is not None
        size = comm.moves.workspace_rows * math.prod(x.shape[1:]) * x.element_size()
        with self.lock:
            self.exchanges += 1
            memory = self.memory.setdefault(size, SharedMemory(self.world, size))
        out = x.new_empty((rows, *x.shape[1:]))
        symmetric.copy_rows(x.contiguous(), out, moves, comm.rank, memory)
        return out


def plans_of(mask: AttnMask, world: int, **config: Any) -> list[AttnPlan]:
    options = PlanConfig(chunk_size=3, transport="symmetric_memory", **config)
    return [magi.make_attn_plan(mask, 2, 1, 8, cp_size=world, cp_rank=r, config=options) for r in range(world)]


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_copies_bring_what_an_all_to_all_brings(world: int, seed: int) -> None:
    for i, mask in enumerate(random_masks(10, seed, square=True)):
        plans = plans_of(mask, world, overlap_degree=i % 3)
        copies = Copies(world)

        def on_rank(rank: int, group: dist.ProcessGroup, plans: Any = plans, copies: Any = copies) -> None:
            gen = torch.Generator().manual_seed(rank)
            for stage in plans[rank].stages:
                if stage.comm is None:
                    continue
                sent = pickle.loads(pickle.dumps(stage.comm))
                sent.__dict__["moves"] = None
                x = torch.randn(sent.num_rows, 2, 3, generator=gen)
                y = torch.randn(sent.num_received, 2, 3, generator=gen)
                with mock.patch.object(exchange, "start_copies", copies):
                    assert torch.equal(magi.group_cast(x, stage.comm, group), magi.group_cast(x, sent, group))
                    found = magi.group_reduce(y, stage.comm, group)
                assert torch.equal(found, magi.group_reduce(y, sent, group))

        with mock.patch.object(exchange, "start_copies", copies):
            run_ranks(on_rank, world)
        num = sum(stage.comm is not None for stage in plans[0].stages)
        assert copies.exchanges == 2 * num * world
        assert sum(memory.barriers for memory in copies.memory.values()) == 4 * num  # two an exchange


@pytest.mark.parametrize("name", ["causal", "document", "full"])
@pytest.mark.parametrize("degree", [0, 2])
def test_attention(name: str, degree: int) -> None:
    x = random_inputs(SQUARE[name], dtype=torch.float64, seed=1, num_heads_q=4, num_heads_kv=2)
    config = PlanConfig(chunk_size=2, overlap_degree=degree, transport="symmetric_memory")
    with mock.patch.object(exchange, "start_copies", Copies(4)):
        runner = context_parallel_runner(4, config)
        check_attention(runner, x.query, x.key, x.value, SQUARE[name], dout=x.dout, dlse=x.dlse)


def test_moves() -> None:
    """Of rank 1 of three, 4 rows each: the next rank's rows first; and out of what the others received, its own."""
    config = PlanConfig(dispatcher="sequential", transport="symmetric_memory")
    plans = [magi.make_attn_plan(masks.full(12, 12), 2, 1, 8, cp_size=3, cp_rank=r, config=config) for r in range(3)]
    comm = plans[1].stages[1].comm
    assert comm is not None and comm.moves is not None
    assert comm.moves.cast == (Move(2, 0, 4, 4), Move(0, 0, 4, 0))
    assert comm.moves.reduce == (Move(2, 4, 8, 4), Move(0, 0, 4, 0))
    assert comm.moves.workspace_rows == 8
    assert pickle.loads(pickle.dumps(comm)).moves == comm.moves
    assert plans[1].with_mask(masks.causal(12)).stages[1].comm.moves.cast == (Move(0, 0, 4, 0),)


def test_rows_on_the_cpu_are_refused() -> None:
    def on_rank(rank: int, group: dist.ProcessGroup) -> None:
        plan = plans_of(masks.full(12, 12), 2)[rank]
        kv = torch.zeros(plan.num_tokens_local, 1, 8, dtype=torch.bfloat16)
        q = torch.zeros(plan.num_tokens_local, 2, 8, dtype=torch.bfloat16)
        text = "transport='symmetric_memory' moves rows between GPUs of one node, got rows on cpu; plan with"
        with pytest.raises(NotImplementedError, match=text):
            magi.context_parallel_attn(q, kv, kv, plan, group)
        comm = plan.stages[1].comm
        assert comm is not None
        with pytest.raises(NotImplementedError, match=text):
            magi.group_reduce(torch.zeros(comm.num_received, 2), comm, group)

    run_ranks(on_rank, 2)


def test_refusals() -> None:
    with pytest.raises(
        ValueError, match=r"transport must be one of \['all_to_all', 'symmetric_memory'\], got 'nvlink'"
    ):
        PlanConfig(transport="nvlink")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="transport='symmetric_memory' is for one node, without ranks_per_node, got 2"):
        PlanConfig(transport="symmetric_memory", ranks_per_node=2)
