"""Losses across ranks: values and gradients are those of one rank, whatever each rank holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

import torch_magi as magi
from torch_magi import PlanConfig, masks
from torch_magi.testing import run_ranks

VOCABULARY, WIDTH = 11, 5
TOKENS = torch.arange(23) * 7 % VOCABULARY
CU_SEQLENS = [0, 4, 5, 17]  # a document of one token, and 6 rows of padding


def whole_problem() -> tuple[Tensor, Tensor, Tensor]:
    """Return embeddings of all tokens, a weight, and all labels, with -100 where there is none."""
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(len(TOKENS), WIDTH, generator=gen, dtype=torch.float64)
    weight = torch.randn(WIDTH, VOCABULARY, generator=gen, dtype=torch.float64)
    labels = torch.full_like(TOKENS, -100)
    for begin, end in ((0, 4), (4, 5), (5, 17)):
        labels[begin : end - 1] = TOKENS[begin + 1 : end]
    return x, weight.requires_grad_(), labels


def truth() -> tuple[Tensor, Tensor]:
    x, weight, labels = whole_problem()
    loss = cross_entropy(x @ weight, labels)
    return loss.detach(), torch.autograd.grad(loss, weight)[0]


def step(rank: int, group: dist.ProcessGroup, how: str, compiled: bool) -> tuple[Tensor, Tensor]:
    """Return the loss and the gradient of the weight, reduced over ranks as `how` says."""
    torch._inductor.config.compile_threads = 1
    config = PlanConfig(chunk_size=6, dispatcher="sequential")  # from 4 ranks on, ranks without valid tokens
    plan = magi.make_attn_plan(masks.causal(23), 1, 1, 8, cp_size=group.size(), cp_rank=rank, config=config)
    plan = plan.with_documents(CU_SEQLENS)
    x, weight, _ = whole_problem()

    def loss_of(x: Tensor, tokens: Tensor, weight: Tensor) -> Tensor:
        logits = magi.dispatch(x, plan) @ weight
        labels = magi.roll(magi.dispatch(tokens, plan), -1, plan, group, fill=-100)
        if how == "replicated":
            return cross_entropy(magi.undispatch(logits, plan, group), magi.undispatch(labels, plan, group))
        if how == "partial":  # each rank's loss covers another part of the vocabulary's rows
            whole, every = magi.undispatch(logits, plan, group, grad="partial"), magi.undispatch(labels, plan, group)
            mine = torch.arange(len(every)) % group.size() == rank
            return cross_entropy(whole[mine], every[mine], reduction="sum") / (every != -100).sum()
        torch._check(len(logits) == len(labels))  # torch 2.11 does not take it from the operator that needs it
        loss_sum = cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        return magi.cp_mean_loss(loss_sum, (labels != -100).sum(), group, grad_reduction=how)

    loss = (torch.compile(loss_of, fullgraph=True) if compiled else loss_of)(x, TOKENS, weight)
    (grad,) = torch.autograd.grad(loss, weight)
    dist.all_reduce(grad)
    return loss.detach(), grad / group.size() if how == "mean" else grad


@pytest.mark.parametrize("how", ["sum", "mean"])
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_c30_mean_over_valid_tokens_of_all_ranks(world: int, how: str) -> None:
    loss, grad = truth()
    for found, found_grad in run_ranks(step, world, args=(how, False)):
        torch.testing.assert_close(found, loss)
        torch.testing.assert_close(found_grad, grad)


@pytest.mark.parametrize("how", ["replicated", "partial"])
def test_c30_logits_gathered_for_the_loss(how: str) -> None:
    loss, grad = truth()
    results = run_ranks(step, 4, args=(how, False))
    torch.testing.assert_close(sum(r[0] for r in results) / (4 if how == "replicated" else 1), loss)
    for _, found in results:
        torch.testing.assert_close(found, grad)


def test_compiled() -> None:
    loss, grad = truth()
    for found, found_grad in run_ranks(step, 2, "processes", ("sum", True), timeout=300):
        torch.testing.assert_close(found, loss)
        torch.testing.assert_close(found_grad, grad)


def count_collectives(rank: int, group: dist.ProcessGroup) -> tuple[dict[str, int], dict[str, int]]:
    from torch.distributed.tensor.debug import CommDebugMode

    loss_sum = torch.tensor(2.0, requires_grad=True)
    counts = []
    with CommDebugMode() as forward:
        loss = magi.cp_mean_loss(loss_sum, 3, group)
    with CommDebugMode() as backward:
        loss.backward()
    for mode in (forward, backward):
        counts.append({str(name): n for name, n in mode.get_comm_counts().items()})
    return counts[0], counts[1]


def test_one_collective_and_none_in_backward() -> None:
    for forward, backward in run_ranks(count_collectives, 2, "processes"):
        assert sum(forward.values()) == 1 and sum(backward.values()) == 0


def several_losses(rank: int, group: dist.ProcessGroup) -> list[Any]:
    sums = torch.tensor([1.0, 2.0, 0.0]) * (rank + 1)
    means = magi.cp_mean_loss(sums.requires_grad_(), torch.tensor([2**25 + rank, 4, 0]), group)
    return [means.tolist(), torch.autograd.grad(means.sum(), sums)[0].tolist()]


def test_several_losses_and_no_tokens() -> None:
    number = 2**26 + 1  # which float32 could not hold
    for means, grads in run_ranks(several_losses, 2):
        assert means == pytest.approx([3 / number, 0.75, 0.0], rel=1e-7)
        assert grads == pytest.approx([1 / number, 0.125, 1.0], rel=1e-7)


@pytest.mark.parametrize(
    ("error", "text", "call"),
    [
        (ValueError, "grad_reduction must be 'sum' or 'mean', got 'max'",
         lambda: magi.cp_mean_loss(torch.zeros(()), 1, None, grad_reduction="max")),
        (TypeError, "loss_sum must be floating point, got torch.int64",
         lambda: magi.cp_mean_loss(torch.zeros((), dtype=torch.int64), 1, None)),
        (ValueError, r"count must have shape \[\] as loss_sum, got \[1\]",
         lambda: magi.cp_mean_loss(torch.zeros(()), torch.ones(1), None)),
        (TypeError, "group must be a ProcessGroup", lambda: magi.cp_mean_loss(torch.zeros(()), 1, 3)),
    ],
)  # fmt: skip
def test_refusals(error: type[Exception], text: str, call: Any) -> None:
    with pytest.raises(error, match=text):
        call()
