"""CommPlan: made from splits, printed, pickled, refused; and the exchanges of plans against brute force."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from torch_magi import CommPlan, PlanConfig, make_attn_plan, masks
from torch_magi.testing import random_masks


def test_from_splits() -> None:
    plan = CommPlan.from_splits([[(0, 2)], [], [(4, 5), (0, 1)]], [2, 0, 3], num_rows=5, rank=0)
    assert plan.send_ranges.tolist() == [[0, 2], [4, 5], [0, 1]]
    assert plan.input_split_sizes == (2, 0, 2) and plan.output_split_sizes == (2, 0, 3)
    assert (plan.num_sent, plan.num_received, plan.num_rows, plan.rank, plan.size) == (4, 5, 5, 0, 3)
    assert plan.rows_from_others == 3
    assert str(plan) == "CommPlan(rank 0, 5 rows: sends [2, 0, 2], receives [2, 0, 3])"
    assert plan.send_ranges_on(torch.device("cpu")).tolist() == plan.send_ranges.tolist()
    assert plan.send_ranges_on(torch.device("cpu")) is plan.send_ranges_on(torch.device("cpu"))


def test_a_rank_without_rows() -> None:
    plan = CommPlan.from_splits([[], [(0, 0)]], [0, 0], num_rows=0, rank=1)
    assert plan.num_sent == plan.num_received == 0 and plan.input_split_sizes == (0, 0)
    assert CommPlan.from_splits([[]], [0], 3, 0).send_ranges.shape == (0, 2)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([[]], [0, 0], 4, 0), "send_rows and output_split_sizes must have one entry per rank, got 1 and 2"),
        (([[], []], [0, 0], 4, 2), r"rank must be in \[0, 2\), got 2"),
        (([[], []], [0, 0], 4, -1), r"rank must be in \[0, 2\), got -1"),
        (([[], []], [0, -3], 4, 0), r"output_split_sizes\[1\] must be 0 or more, got -3"),
        (([[(0, 5)], []], [0, 0], 4, 0), r"send_rows\[0\] must lie in \[0, 4\], got \[0, 5\] at index 0"),
        (([[], [(-1, 2)]], [0, 0], 4, 0), r"send_rows\[1\] must lie in \[0, 4\], got \[-1, 2\] at index 0"),
        (([[(3, 2)], []], [0, 0], 4, 0), r"send_rows\[0\] must not be reversed, got \[3, 2\] at index 0"),
        (([[0, 2], []], [0, 0], 4, 0), r"send_rows\[0\] must have shape \[n, 2\], got \(2,\)"),
        (
            ([[(0, 2)], []], [3, 0], 4, 0),
            r"from itself what it sends to itself, 2 rows, got output_split_sizes\[0\] = 3",
        ),
        (([[(0, 1.5)], []], [1, 0], 4, 0), r"send_rows\[0\] must hold integers, got float64"),
        (([[], []], [0.5, 0], 4, 0), r"output_split_sizes\[0\] must be an int, got 0.5"),
    ],
)
def test_refusals(arguments: tuple, text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        CommPlan.from_splits(*arguments)


def test_pickling() -> None:
    plan = CommPlan.from_splits([[(0, 2)], [(1, 3)]], [2, 1], num_rows=3, rank=0)
    plan.send_ranges_on(torch.device("cpu"))
    other = pickle.loads(pickle.dumps(plan))
    assert str(other) == str(plan) and other.send_ranges.tolist() == plan.send_ranges.tolist()
    assert other.send_ranges_on(torch.device("cpu")).tolist() == plan.send_ranges.tolist()


def test_rows_equal_brute_force(seed: int) -> None:
    """What a rank receives is what its rows see and it does not hold; counted on dense masks."""
    for mask in random_masks(60, seed, square=True):
        dense = mask.to_dense().numpy()
        for world, degree in ((2, 0), (3, 1), (4, 2)):
            config = PlanConfig(chunk_size=3, overlap_degree=degree)
            plans = [make_attn_plan(mask, 2, 1, 8, cp_size=world, cp_rank=r, config=config) for r in range(world)]
            held = [p.position_ids.numpy() for p in plans]
            expected = np.zeros((world, world), int)  # [receiver, sender]
            for receiver in range(world):
                seen = dense[held[receiver]].any(0)
                for sender in range(world):
                    expected[receiver, sender] = seen[held[sender]].sum()
            for receiver, plan in enumerate(plans):
                exchanges = [s.comm for s in plan.stages if s.comm is not None]
                received = np.sum([c.output_split_sizes for c in exchanges], 0)
                sent = np.sum([c.input_split_sizes for c in exchanges], 0)
                others = np.arange(world) != receiver
                assert (received[others] == expected[receiver][others]).all()
                assert (sent[others] == expected[:, receiver][others]).all()
                assert received[receiver] == (expected[receiver, receiver] if degree == 0 else 0)
                assert plan.comm_rows_per_rank[receiver] == expected[receiver][others].sum()


def test_the_keys_of_the_next_rank_come_first() -> None:
    config = PlanConfig(dispatcher="sequential", overlap_degree=3)
    plans = [make_attn_plan(masks.full(16, 16), 2, 1, 8, cp_size=4, cp_rank=r, config=config) for r in range(4)]
    for r, plan in enumerate(plans):
        senders = [np.flatnonzero(s.comm.output_split_sizes).tolist() for s in plan.stages[1:]]
        assert senders == [[(r + 1) % 4], [(r + 2) % 4], [(r + 3) % 4]]
