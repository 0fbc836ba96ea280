"""How rows travel between GPUs. Ranks are processes that share one GPU, with gloo, as NCCL refuses that."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import torch_magi as magi
from torch_magi import CommPlan, PlanConfig, masks
from torch_magi.testing import run_ranks

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

LENGTHS = (96, 1024, 512)  # the memory that ranks share has to grow once


def comms_of(length: int, rank: int, world: int, **config: Any) -> list[CommPlan]:
    """Return the exchanges of two stages."""
    options = PlanConfig(overlap_degree=2, **config)
    mask = masks.document([0, length // 3, length])
    plan = magi.make_attn_plan(mask, 4, 2, 8, cp_size=world, cp_rank=rank, config=options)
    return [stage.comm for stage in plan.stages if stage.comm is not None]


def compare(comm: CommPlan, where: Any, expected_comm: CommPlan, expected_where: Any, seed: int) -> None:
    """Compare casts and reductions on the GPU with others on the CPU, of integers, whose sums are exact."""
    gen = torch.Generator().manual_seed(seed)
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randint(-9, 10, (comm.num_rows, 2, 8), generator=gen).to(dtype)
        expected = magi.group_cast(x, expected_comm, expected_where)
        # Three at once, of tensors that are gone, and whose memory is written again, while rows travel.
        arrived = [magi.group_cast(x.cuda() + i, comm, where) for i in range(3)]
        assert all(torch.equal(t.cpu(), expected + i) for i, t in enumerate(arrived))
        returned = [magi.group_reduce(t + 1, comm, where) for t in arrived]
        for i, t in enumerate(returned):
            wanted = magi.group_reduce(expected + i + 1, expected_comm, expected_where)
            assert torch.equal(t.cpu(), wanted)


def copied(rank: int, group: dist.ProcessGroup) -> None:
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    for length in LENGTHS:
        sent = comms_of(length, rank, group.size())
        fetched = comms_of(length, rank, group.size(), transport="symmetric_memory")
        for a, b in zip(fetched, sent, strict=True):
            compare(a, group, b, group, rank)


@pytest.mark.parametrize("world", [2, 4])
def test_symmetric_memory(world: int) -> None:
    run_ranks(copied, world, "processes", timeout=120)


def in_two_steps(rank: int, group: dist.ProcessGroup) -> None:
    mesh: DeviceMesh = init_device_mesh("cpu", (2, 2))
    for length in LENGTHS:
        for comm in comms_of(length, rank, group.size(), ranks_per_node=2):
            compare(comm, mesh, comm, mesh, rank)


def test_two_steps() -> None:
    run_ranks(in_two_steps, 4, "processes", timeout=120)
