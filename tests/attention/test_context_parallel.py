"""context_parallel_attn on 1 to 8 local ranks against float64 truth, and its negative control."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup

import torch_magi as magi
from torch_magi import masks
from torch_magi.masks import AttnMask
from torch_magi.plan import AttnPlan
from torch_magi.testing import (
    check_attention,
    context_parallel_runner,
    count_probe,
    flex_flash_runner,
    named_masks,
    random_inputs,
    random_masks,
    run_ranks,
    run_reference,
)

Tensor = torch.Tensor
NAMED = {name: mask for name, mask in named_masks().items() if mask.shape[0] == mask.shape[1]}


def check(
    mask: AttnMask,
    world: int,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    heads: tuple[int, int] = (4, 2),
    config: magi.PlanConfig | None = None,
    **options: Any,
) -> None:
    x = random_inputs(mask, dtype=dtype, seed=seed, num_heads_q=heads[0], num_heads_kv=heads[1])
    runner = context_parallel_runner(world, config)
    check_attention(runner, x.query, x.key, x.value, mask, dout=x.dout, dlse=x.dlse, **options)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", NAMED)
def test_named_masks(name: str, world: int) -> None:
    for degree in range(4):
        check(NAMED[name], world, config=magi.PlanConfig(chunk_size=5, overlap_degree=degree))


@pytest.mark.parametrize("dispatcher", ["sequential", "head_tail", "min_heap"])
@pytest.mark.parametrize("world", [2, 4])
def test_random_masks(world: int, dispatcher: Any) -> None:
    config = magi.PlanConfig(dispatcher=dispatcher, overlap_degree=2)
    for seed, mask in enumerate(random_masks(20, seed=world, square=True)):
        check(mask, world, torch.float32, seed, config=config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_c37_dtypes(dtype: torch.dtype) -> None:
    check(masks.document([0, 30, 77], total=80), 2, dtype, config=magi.PlanConfig(chunk_size=8))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("degree", [0, 2])
def test_count_probe(world: int, degree: int) -> None:
    runner = context_parallel_runner(world, magi.PlanConfig(chunk_size=3, overlap_degree=degree))
    for name in ("causal", "document", "shared_prefix"):
        count_probe(runner, NAMED[name])


def test_c04_ranks_where_everything_is_masked() -> None:
    check(AttnMask.from_slices([[0, 4]], [[0, 4]], ["causal"], 32, 32), 4, config=magi.PlanConfig(chunk_size=8))
    check(masks.full(32, 32) - masks.full(32, 32), 4)


def test_c09_odd_document_lengths() -> None:
    check(masks.document([0, 4, 7], total=10), 2, config=magi.PlanConfig(chunk_size=1))


def test_c11_padding_inside_the_pack() -> None:
    mask = masks.from_document_ids([1, 1, 1, 0, 2, 2, 0, 0], padding_id=0)
    assert mask.to_dense().any(1).nonzero().flatten().tolist() == [0, 1, 2, 4, 5]
    check(mask, 2, config=magi.PlanConfig(chunk_size=1))


def test_c16_full_mask_head_tail() -> None:
    check(masks.full(128, 128), 2, config=magi.PlanConfig(dispatcher="head_tail"))


@pytest.mark.parametrize(("mask", "may_change"), [
    (masks.document([0, 8, 16]), range(0, 8)),
    (masks.sliding_window(16, 16, (3, 0)), range(0, 4)),
], ids=["documents", "window"])  # fmt: skip
def test_c25_a_changed_token_changes_only_what_sees_it(mask: AttnMask, may_change: range) -> None:
    x = random_inputs(mask, dtype=torch.float32, seed=1)
    runner = context_parallel_runner(2, magi.PlanConfig(chunk_size=2))
    before = runner(x.query, x.key, x.value, mask).out
    for t in (x.query, x.key, x.value):
        t[0] += 1.0
    after = runner(x.query, x.key, x.value, mask).out
    same = (before == after).flatten(1).all(1)
    assert same[[i for i in range(16) if i not in may_change]].all() and not same[list(may_change)].any()


def test_c28_stale_keys_in_backward() -> None:
    check(masks.full(16, 16), 4, config=magi.PlanConfig(dispatcher="sequential", overlap_degree=3))


def test_c29_the_error_does_not_grow_with_the_ranks() -> None:
    mask = masks.causal(4096)
    x = random_inputs(mask, dtype=torch.bfloat16, seed=0, num_heads_q=2, num_heads_kv=2, head_dim=64)
    truth = run_reference(x.query, x.key, x.value, mask, dout=x.dout)
    errors = {}
    for world in (1, 2, 4, 8):
        found = context_parallel_runner(world)(x.query, x.key, x.value, mask, dout=x.dout)
        errors[world] = [
            (getattr(found, n).double() - getattr(truth, n)).abs().max().item() for n in ("out", "dq", "dk", "dv")
        ]
    print(errors)
    for world in (2, 4, 8):
        assert all(e <= 1.5 * one for e, one in zip(errors[world], errors[1], strict=True))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_c31_sink_counts_once(world: int) -> None:
    mask = masks.document([0, 3, 8], total=9)
    sink = torch.randn(3, 4, generator=torch.Generator().manual_seed(2))
    for degree in (0, 2):
        check(mask, world, sink=sink, config=magi.PlanConfig(chunk_size=1, overlap_degree=degree))


def test_c33_grouped_heads_and_bytes() -> None:
    mask = masks.causal(5)
    plan = magi.make_attn_plan(mask, 9, 3, 8, dtype=torch.float32, cp_size=2, config=magi.PlanConfig(chunk_size=1))
    assert plan.comm_bytes == plan.comm_rows * 3 * (8 + 8) * 4
    check(mask, 2, heads=(9, 3), config=magi.PlanConfig(chunk_size=1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("degree", range(4))
def test_c33_collectives_and_bytes_are_those_of_the_plan(degree: int, dtype: torch.dtype) -> None:
    """An exchange a stage; backward one for the keys again and one for their float32 gradients; and nothing else."""
    world, config = 4, magi.PlanConfig(chunk_size=3, overlap_degree=degree)
    options: Any = {"head_dim_v": 6, "dtype": dtype, "cp_size": world, "config": config}
    plans = [magi.make_attn_plan(masks.document([0, 13, 50]), 9, 3, 8, cp_rank=r, **options) for r in range(world)]
    sent: list[int] = []
    collectives: list[str] = []

    def note_bytes(out: Tensor, rows: Tensor, receives: list[int], sends: list[int], **more: Any) -> Any:
        to_others = sum(sends) - sends[dist.get_rank()]
        sent.append(to_others * rows[:1].numel() * rows.element_size())
        return all_to_all_single(out, rows, receives, sends, **more)

    def note(collective: Any, group: Any) -> Any:
        collectives.append(type(collective).__name__)
        return start(collective, group)

    def forward_and_backward(rank: int, group: dist.ProcessGroup, backward: bool) -> Tensor:
        n = plans[rank].num_tokens_local
        q, k, v = (torch.randn(n, h, d).to(dtype).requires_grad_() for h, d in ((9, 8), (3, 8), (3, 6)))
        with torch.set_grad_enabled(backward):
            out = magi.context_parallel_attn(q, k, v, plans[rank], group)
        return torch.autograd.grad(out.sum(), q)[0] if backward else out

    found = []
    all_to_all_single, start = dist.all_to_all_single, ProcessLocalGroup._start_coll
    with (
        mock.patch.object(dist, "all_to_all_single", note_bytes),
        mock.patch.object(ProcessLocalGroup, "_start_coll", note),
    ):
        for backward in (False, True):
            sent.clear()
            collectives.clear()
            run_ranks(forward_and_backward, world, args=(backward,))
            found.append((collectives.copy(), sum(sent)))
    exchanges, numbers = max(degree, 1), plans[0].comm_rows * 3 * (8 + 6)
    assert plans[0].comm_bytes == numbers * dtype.itemsize > 0
    assert found == [
        (["AllToAllBase"] * exchanges * world, plans[0].comm_bytes),
        (["AllToAllBase"] * 3 * exchanges * world, 2 * plans[0].comm_bytes + numbers * 4),
    ]


def test_c38_softcap() -> None:
    check(masks.document([0, 20, 50]), 2, softcap=5.0, config=magi.PlanConfig(chunk_size=4))


def test_c39_same_bits() -> None:
    mask = masks.causal(64)
    x = random_inputs(mask, dtype=torch.float32, seed=3, num_heads_q=16, num_heads_kv=2)
    runner = context_parallel_runner(2, magi.PlanConfig(chunk_size=8), deterministic=True)
    runs = [runner(x.query, x.key, x.value, mask, dout=x.dout) for _ in range(20)]
    for other in runs[1:]:
        for a, b in zip(runs[0], other, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)


def _linear_training(
    rank: int, group: dist.ProcessGroup, mask: AttnMask, x: Tensor, weight: Tensor, how: str
) -> Tensor:
    """One step of linear -> attention -> mean square of all tokens; returns the gradient of the weight."""
    w = weight.clone().requires_grad_()
    plan = magi.make_attn_plan(mask, 1, 1, 8, dtype=torch.float64, cp_size=group.size(), cp_rank=rank,
                               config=magi.PlanConfig(chunk_size=2))  # fmt: skip
    q = (magi.dispatch(x, plan) @ w)[:, None]
    out = magi.context_parallel_attn(q, q, q, plan, group)
    if how == "local":
        loss = out.square().sum() / out[0].numel() / len(x)
    else:
        whole = magi.undispatch(out, plan, group, grad="replicated" if how == "replicated" else "partial")
        if how == "partial":  # each rank's loss covers another part of the whole
            whole = whole.tensor_split(group.size())[rank]
        loss = whole.square().sum() / out[0].numel() / len(x)
    loss.backward()
    assert w.grad is not None
    dist.all_reduce(w.grad)
    return w.grad


@pytest.mark.parametrize("how", ["local", "replicated", "partial"])
def test_c30_no_stray_factor_of_the_ranks(how: str) -> None:
    mask, gen = masks.document([0, 7, 21]), torch.Generator().manual_seed(0)
    x = torch.randn(21, 8, generator=gen, dtype=torch.float64)
    weight = torch.randn(8, 8, generator=gen, dtype=torch.float64)
    one = run_ranks(_linear_training, 1, args=(mask, x, weight, how))[0]
    for grad in run_ranks(_linear_training, 4, args=(mask, x, weight, how)):
        torch.testing.assert_close(grad, one)


def test_negative_control_a_zeroed_stage_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_magi.attention import context_parallel

    start = context_parallel.start_cast

    def zeroed(x: Tensor, plan: AttnPlan, stage: int, *rest: Any) -> Tensor:
        return start(torch.zeros_like(x) if stage == 2 else x, plan, stage, *rest)

    monkeypatch.setattr(context_parallel, "start_cast", zeroed)
    with pytest.raises(AssertionError, match="off by"):
        check(masks.causal(64), 2, config=magi.PlanConfig(chunk_size=4, overlap_degree=2))


def test_one_rank_needs_no_group() -> None:
    mask = masks.causal(8)
    x = random_inputs(mask, dtype=torch.float32, seed=0)
    plan = magi.make_attn_plan(mask, x.query.shape[1], x.key.shape[1], x.query.shape[2], head_dim_v=x.value.shape[2],
                               dtype=torch.float32)  # fmt: skip
    out = magi.context_parallel_attn(x.query, x.key, x.value, plan, None)
    assert torch.equal(out, flex_flash_runner()(x.query, x.key, x.value, mask).out)


def _with_every_kind_of_group(rank: int, group: dist.ProcessGroup) -> bool:
    from torch.distributed.device_mesh import init_device_mesh

    mask = masks.causal(8)
    plan = magi.make_attn_plan(mask, 1, 1, 4, dtype=torch.float32, cp_size=2, cp_rank=rank)
    q = torch.ones(plan.num_tokens_local, 1, 4) * (rank + 1)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    outs = [magi.context_parallel_attn(q, q, q, plan, g) for g in (group, group.group_name, mesh, mesh["cp"])]
    two = init_device_mesh("cpu", (2, 1), mesh_dim_names=("cp", "tp"))
    with pytest.raises(ValueError, match="one-dimensional"):
        magi.context_parallel_attn(q, q, q, plan, two)
    other = magi.make_attn_plan(mask, 1, 1, 4, dtype=torch.float32, cp_size=4, cp_rank=rank)
    with pytest.raises(ValueError, match=r"cp_size=4 ranks, but group .* has 2"):
        magi.context_parallel_attn(q, q, q, other, group)
    other = magi.make_attn_plan(mask, 1, 1, 4, dtype=torch.float32, cp_size=2, cp_rank=1 - rank)
    for call in (magi.context_parallel_attn, lambda x, *rest: magi.undispatch(x, *rest[2:])):
        with pytest.raises(ValueError, match=f"the plan is for rank {1 - rank}, but this is rank {rank} of group"):
            call(q, q, q, other, group)
    return all(torch.equal(outs[0], o) for o in outs)


def test_groups() -> None:
    assert run_ranks(_with_every_kind_of_group, 2, "processes") == [True, True]


def test_wrong_tensors_start_no_exchange() -> None:
    """Nobody would wait for it, which keeps the group from closing."""

    def on_rank(rank: int, group: dist.ProcessGroup) -> None:
        plan = magi.make_attn_plan(masks.causal(8), 1, 1, 4, dtype=torch.float32, cp_size=2, cp_rank=rank)
        q, k = torch.ones(8, 1, 4), torch.ones(4, 1, 4)
        with pytest.raises(
            ValueError, match=rf"query must have shape \[4, 1, 4\] .* \(rank {rank} of 2 holds 4 rows\)"
        ):
            magi.context_parallel_attn(q, k, k, plan, group)

    run_ranks(on_rank, 2, timeout=10)


attend = magi.context_parallel_attn
PLAN = magi.make_attn_plan(masks.causal(8), 2, 2, 16, dtype=torch.float32)
TWO = magi.make_attn_plan(masks.causal(8), 2, 2, 16, dtype=torch.float32, cp_size=2)
Q = torch.zeros(8, 2, 16)


@pytest.mark.parametrize(("error", "text", "call"), [
    (TypeError, "plan must be an AttnPlan, got AttnMask", lambda: attend(Q, Q, Q, masks.causal(8), None)),
    (TypeError, "group must be given: the plan is for cp_size=2", lambda: attend(Q, Q, Q, TWO, None)),
    (TypeError, "group must be a ProcessGroup", lambda: attend(Q, Q, Q, TWO, 3)),
    (ValueError, "must be dispatched rows", lambda: attend(Q[None], Q[None], Q[None], PLAN, None)),
    (ValueError, r"query must have shape \[8, 2, 16\]", lambda: attend(Q[:4], Q[:4], Q[:4], PLAN, None)),
    (ValueError, "x must have 8 rows", lambda: magi.dispatch(Q[:3], PLAN)),
    (ValueError, "x must have 8 rows", lambda: magi.undispatch(Q[:3], PLAN, None)),
    (TypeError, "plan must be an AttnPlan", lambda: magi.dispatch(Q, None)),
    (ValueError, "grad must be 'replicated' or 'partial'", lambda: magi.undispatch(Q, PLAN, None, grad="sum")),
])  # fmt: skip
def test_refusals(error: type[Exception], text: str, call: Any) -> None:
    with pytest.raises(error, match=text):
        call()
