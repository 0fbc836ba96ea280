"""flex_attn_fwd and flex_attn_bwd as operators, and `torch.library.opcheck` of every operator of torch_magi."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torch_magi import CommPlan, PlanConfig, make_attn_plan, masks
from torch_magi.masks import AttnMask
from torch_magi.ops import flex_attn_fwd
from torch_magi.ops.flex_attn import CPU_TILES
from torch_magi.ops.plan_types import Size
from torch_magi.testing import (
    assert_close_to_truth,
    check_attention,
    count_probe,
    make_runner,
    named_masks,
    random_inputs,
    run_lows,
    run_ranks,
    run_reference,
)

Tensor = torch.Tensor
Sample = tuple[Any, ...]
OPS = torch.ops.torch_magi
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
NAMED = named_masks()
CPU = torch.device("cpu")

# --- opcheck ---

ONLY_ON_GPUS = ("torch_magi::flex_attn_fwd_sm90", "torch_magi::flex_attn_bwd_sm90")  # tests/gpu
REGISTERED = sorted(
    {
        name.split("::")[1].split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("torch_magi::") and not name.startswith(ONLY_ON_GPUS)
    }
)
ALL_UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
# Start operators return before their result has arrived, as all of torch's asynchronous collectives do, and opcheck
# compares results without waiting for them. Traced values are compared where these operators are used, below.
START_UTILITIES = ALL_UTILITIES[:3]
# These decompose into operators of ours, which are checked one by one, and torch's own wait_tensor, whose result
# shares memory with its argument against its schema: the two utilities that look at aliases refuse it.
COMPOSITE_UTILITIES = ("test_autograd_registration", "test_aot_dispatch_dynamic")


def normal(*shape: int, grad: bool = False, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=dtype).requires_grad_(grad)


def strided(x: Tensor) -> Tensor:
    """Return the same values with gaps between rows, heads and elements."""
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), math.nan, dtype=x.dtype)
    wide[..., ::2] = x.detach()
    return wide[..., ::2].requires_grad_(x.requires_grad)


def local_samples() -> dict[str, list[Sample]]:
    """Return arguments of every operator that needs no other rank."""
    torch.manual_seed(0)
    plan = make_attn_plan(masks.document([0, 3, 8], total=10), 4, 2, 8, head_dim_v=6, dtype=torch.float32)
    nothing = make_attn_plan(masks.full(0, 0), 4, 2, 8, head_dim_v=6, dtype=torch.float32)
    of_two = make_attn_plan(masks.causal(10), 4, 2, 8, dtype=torch.float32, cp_size=2, config=PlanConfig(chunk_size=2))
    local, exchange = of_two.num_tokens_local, of_two.stages[1].comm
    assert exchange is not None
    comm = CommPlan.from_splits([[(0, 2), (1, 3)], []], [4, 0], 5, 0)
    ranges = torch.tensor([[0, 2], [1, 4], [4, 4]])
    no_ranges = torch.zeros(0, 2, dtype=torch.long)

    def qkv(rows: int = 10, grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        return normal(rows, 4, 8, grad=grad), normal(rows, 2, 8, grad=grad), normal(rows, 2, 6, grad=grad)

    def forward(
        *,
        sink: Tensor | None = None,
        before: tuple[Tensor | None, Tensor | None] = (None, None),
        softcap: float = 0.0,
        wide: bool = False,
        most: bool = False,
    ) -> Sample:
        return (plan, 0, sink, *before, 0.3, softcap, wide, most, False, "auto", 0)

    def backward(sink: Tensor | None, dlse: Tensor | None, before: Tensor | None, wide: bool) -> Sample:
        q, k, v = qkv()
        out, lse, _ = OPS.flex_attn_fwd(q, k, v, *forward(sink=sink))
        dout = normal(10, 4, 6)
        return (dout, dlse, q, k, v, out, lse, before, plan, 0, sink, 0.3, 0.0, wide, False, "auto", 0)

    def backward_tiles(sink: Tensor | None, dlse: Tensor | None) -> Sample:
        dout, dlse, q, k, v, out, lse, *_ = backward(sink, dlse, None, False)
        return (dout, dlse, q, k, v, out, lse, *tiles("q"), *tiles("k"), sink, list(CPU_TILES), 0.3, 0.0, False)

    def tiles(side: str) -> tuple[Tensor, Tensor, Tensor]:
        return plan.stages[0].tiles(side, 64, 64, CPU)

    return {
        "flex_attn_fwd": [
            (*qkv(), *forward()),
            (*qkv(grad=True), *forward()),
            (*qkv(grad=True), *forward(sink=normal(3, 4, grad=True), softcap=2.0, wide=True, most=True)),
            (*qkv(grad=True), *forward(sink=normal(10, 1, 4, grad=True))),
            (*qkv(), *forward(before=(normal(10, 4, 6), normal(10, 4)), wide=True)),
            (*qkv(grad=True), *forward(before=(normal(10, 4, 6, grad=True), normal(10, 4, grad=True)))),
            (*map(strided, qkv(grad=True)), *forward()),
            (*qkv(0), nothing, *forward()[1:]),
        ],
        "flex_attn_bwd": [
            backward(None, None, None, False),
            backward(normal(3, 4), normal(10, 4), normal(10, 4, 8), True),
            backward(normal(10, 2, 4), normal(10, 4), None, False),
        ],
        "flex_attn_fwd_tiles": [
            (*qkv(), *tiles("q"), None, 64, 64, 0.3, 0.0, False, False),
            (*map(strided, qkv()), *tiles("q"), normal(3, 4), 64, 64, 0.3, 2.0, True, True),
        ],
        "flex_attn_bwd_tiles": [
            backward_tiles(None, None),
            backward_tiles(normal(10, 2, 4), normal(10, 4)),
        ],
        "merge_state": [
            (normal(3, 2, 4), normal(3, 2), normal(3, 2, 4), normal(3, 2)),
            (normal(3, 2, 4, grad=True), normal(3, 2, grad=True), normal(3, 2, 4, grad=True), normal(3, 2, grad=True)),
            (normal(3, 2, 4, grad=True), normal(3, 2), strided(normal(3, 2, 4)), normal(2, 3).T),
            (normal(0, 2, 4), normal(0, 2), normal(0, 2, 4), normal(0, 2)),
        ],
        "range_gather": [
            (normal(5, 3), ranges, 5),
            (normal(5, 2, 3, grad=True), ranges, 5),
            (strided(normal(5, 3, dtype=torch.bfloat16)), ranges, 5),
            (normal(5, 3), no_ranges, 0),
        ],
        "range_scatter_add": [
            (normal(5, 3), ranges, 6),
            (normal(5, 2, 3, grad=True), ranges, 6),
            (strided(normal(5, 3, dtype=torch.bfloat16)), ranges, 6),
            (normal(0, 3), no_ranges, 4),
        ],
        "plan_size": [(normal(1), of_two, 1, int(which)) for which in Size],
        "comm_plan_size": [(normal(1), comm, 0, int(which)) for which in (Size.SENT, Size.RECEIVED, Size.LOCAL)],
        "rows_between": [
            (normal(10, 3), of_two, "whole", "local", local),
            (normal(local, 3), of_two, "local", "whole", 10),
        ],
        "dispatch": [(normal(10, 3), of_two, local), (normal(10, 3, grad=True), of_two, local)],
        "add_returned": [(normal(exchange.num_sent, 3), of_two, 1, local)],
        "add_returned_rows": [(normal(4, 3), comm, 0, 5)],
        "merge_returned": [(normal(4, 2, 3), normal(4, 2), comm, 5)],
        "num_copies": [(normal(1), comm, 5)],
        "place_rolled": [(normal(local, 3), of_two, -1, None), (torch.arange(local), of_two, 2, -100)],
    }


def group_samples(rank: int, name: str) -> dict[str, tuple[tuple[str, ...], list[Sample]]]:
    """Return the utilities for, and the arguments of, every operator that talks to other ranks; for two ranks."""
    torch.manual_seed(rank)
    sends = [[(0, 2), (1, 3)], []] if rank == 0 else [[(0, 1)], [(2, 3)]]
    comm = CommPlan.from_splits(sends, [[4, 1], [0, 1]][rank], 5, rank)
    config = PlanConfig(chunk_size=2, overlap_degree=1)
    plan = make_attn_plan(
        masks.causal(10), 4, 2, 8, head_dim_v=6, dtype=torch.float32, cp_size=2, cp_rank=rank, config=config
    )
    n, padded, exchange = plan.num_tokens_local, max(plan.dispatch.tokens_per_rank), plan.stages[1].comm
    assert exchange is not None
    received, sent = exchange.num_received, exchange.num_sent
    options = (0.3, 0.0, True, False, "auto", 0, 0)
    dtypes = (torch.bfloat16, torch.float32, torch.float32)
    return {
        "group_cast_all_to_all": (START_UTILITIES, [(normal(n, 3), None, plan, 1, received, name)]),
        "group_reduce_all_to_all": (START_UTILITIES, [(normal(received, 3), None, plan, 1, False, sent, name)]),
        "group_cast_all_to_all_rows": (START_UTILITIES, [(normal(5, 3), None, comm, 0, comm.num_received, name)]),
        "group_reduce_all_to_all_rows": (
            START_UTILITIES,
            [(normal(comm.num_received, 3), None, comm, 0, False, comm.num_sent, name)],
        ),
        "group_cast": (
            COMPOSITE_UTILITIES,
            [(normal(5, 3, grad=g), comm, comm.num_sent, comm.num_received, *dtypes[:2], name) for g in (False, True)],
        ),
        "group_reduce": (
            COMPOSITE_UTILITIES,
            [(normal(comm.num_received, 3, grad=g), comm, comm.num_sent, 5, *dtypes, name) for g in (False, True)],
        ),
        "group_merge": (
            COMPOSITE_UTILITIES,
            [
                (
                    normal(comm.num_received, 2, 3, grad=g), normal(comm.num_received, 2, grad=g), comm,
                    comm.num_sent, 5, *dtypes[:2], name,
                )
                for g in (False, True)
            ],
        ),
        "cp_mean_loss": (
            COMPOSITE_UTILITIES,
            [(normal(2, grad=g), torch.tensor([3, 4]), name, g) for g in (False, True)],
        ),
        "roll_all_to_all": (START_UTILITIES, [(normal(n, 3), plan, -1, wrap, name) for wrap in (False, True)]),
        "roll": (
            COMPOSITE_UTILITIES,
            [(normal(n, 3, grad=g), plan, -1, fill, name) for g in (False, True) for fill in (None, 0.5)],
        ),
        "undispatch": (
            COMPOSITE_UTILITIES,
            [(normal(n, 3, grad=True), plan, padded, 10, 2, name, grad) for grad in ("replicated", "partial")],
        ),
        "context_parallel_attn": (
            COMPOSITE_UTILITIES,
            [
                (
                    *(normal(n, heads, dim, grad=g) for heads, dim in ((4, 8), (2, 8), (2, 6))),
                    plan, normal(2, 4, grad=g) if g else None, 2, [received], [sent], name, *options,
                )
                for g in (False, True)
            ],
        ),
    }  # fmt: skip


NEEDS_A_GROUP = (
    "context_parallel_attn",
    "cp_mean_loss",
    "group_cast",
    "group_cast_all_to_all",
    "group_cast_all_to_all_rows",
    "group_merge",
    "group_reduce",
    "group_reduce_all_to_all",
    "group_reduce_all_to_all_rows",
    "roll",
    "roll_all_to_all",
    "undispatch",
)


def failures_of(name: str, samples: list[Sample], utilities: tuple[str, ...]) -> list[str]:
    """Return what opcheck has against an operator."""
    found = []
    for i, arguments in enumerate(samples):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results = torch.library.opcheck(
                getattr(OPS, name).default, arguments, test_utils=utilities, raise_exception=False
            )
        assert set(results) == set(utilities)
        found += [f"sample {i}, {utility}: {text}" for utility, text in results.items() if text != "SUCCESS"]
    return found


def opcheck_on_rank(rank: int, group: Any) -> dict[str, list[str]]:
    """Return the failures of every operator that talks to other ranks. Runs in a process of its own."""
    samples = group_samples(rank, group.group_name)
    return {name: failures_of(name, arguments, utilities) for name, (utilities, arguments) in samples.items()}


@pytest.fixture(scope="module")
def group_failures() -> list[dict[str, list[str]]]:
    """What opcheck has against each operator that needs a group, for each rank."""
    found: list[dict[str, list[str]]] = run_ranks(opcheck_on_rank, 2, "processes", timeout=200)
    return found


def test_every_operator_has_samples() -> None:
    assert REGISTERED == sorted((*local_samples(), *NEEDS_A_GROUP)), "an operator has no sample for opcheck"


@pytest.mark.parametrize("name", [name for name in REGISTERED if name not in NEEDS_A_GROUP])
def test_opcheck(name: str) -> None:
    assert failures_of(name, local_samples()[name], ALL_UTILITIES) == []


@pytest.mark.parametrize("name", NEEDS_A_GROUP)
def test_opcheck_with_a_group(name: str, group_failures: list[dict[str, list[str]]]) -> None:
    assert [failures[name] for failures in group_failures] == [[], []]


@pytest.mark.parametrize("name", REGISTERED)
def test_tags(name: str) -> None:
    op = getattr(OPS, name).default
    assert torch.Tag.pt2_compliant_tag in op.tags
    # Inductor's CUDA graphs would replay an old plan.
    takes_plan = any(argument.name == "plan" for argument in op._schema.arguments)
    assert (torch.Tag.cudagraph_unsafe in op.tags) == (takes_plan or name.startswith("flex_attn"))


def test_opcheck_notices_a_wrong_fake() -> None:
    """Negative control."""
    with torch.library._scoped_library("torch_magi_test", "DEF") as lib:
        lib.define("twice(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
        lib.impl("twice", lambda x: 2 * x, "CompositeExplicitAutograd")
        torch.library.register_fake("torch_magi_test::twice", lambda x: x.new_empty(x.shape[0] + 1), lib=lib)
        with pytest.raises(torch.testing._internal.optests.generate_tests.OpCheckError, match="test_faketensor"):
            torch.library.opcheck(torch.ops.torch_magi_test.twice.default, (normal(3),))


# --- values ---


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: AttnMask, *, scale: float | None, softcap: float,
    sink: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    plan = make_attn_plan(
        mask, query.shape[1], key.shape[1], query.shape[2], head_dim_v=value.shape[2], dtype=query.dtype
    )
    scale = query.shape[2] ** -0.5 if scale is None else scale
    return flex_attn_fwd(query, key, value, plan, sink=sink, scale=scale, softcap=softcap, return_max_logits=True)


run = make_runner(attention)


def check(
    mask: AttnMask,
    dtype: torch.dtype,
    seed: int,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (8, 6),
    **options: Any,
) -> Any:
    x = random_inputs(mask, *heads, *dims, dtype=dtype, seed=seed, nan_in_unused=True)
    return check_attention(run, *x[:3], mask, dout=x.dout, dlse=x.dlse, **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("name", NAMED)
def test_values(name: str, dtype: torch.dtype, seed: int) -> None:
    check(NAMED[name], dtype, seed)


@pytest.mark.parametrize("name", NAMED)
def test_which_pairs_are_seen(name: str) -> None:
    count_probe(run, NAMED[name])


OPTIONS = [(None, 0.0, -0.7), ("per head", 2.5, None), ("per row", 1.0, 3.0), ("per row", 0.0, 0.0)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "softcap", "scale"), OPTIONS)
def test_options_together(kind: str | None, softcap: float, scale: float | None, dtype: torch.dtype, seed: int) -> None:
    for name in ("document_empty_ones_and_tail", "nothing"):
        mask = NAMED[name]
        sinks = {"per head": (3, 4), "per row": (mask.shape[0], 2, 4)}
        sink = None if kind is None else torch.randn(sinks[kind], generator=torch.Generator().manual_seed(seed))
        check(mask, dtype, seed, sink=sink, softcap=softcap, scale=scale)


@pytest.mark.parametrize("dims", [(1, 1), (16, 3), (3, 16), (24, 40), (80, 128)])
@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (5, 1)])
def test_heads_and_head_dims(heads: tuple[int, int], dims: tuple[int, int], seed: int) -> None:
    check(NAMED["document_window"], torch.bfloat16 if dims == (24, 40) else torch.float64, seed, heads, dims)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_c40_strided_inputs(dtype: torch.dtype, seed: int) -> None:
    mask, sink = NAMED["document"], torch.randn(3, 4)
    layouts: list[Callable[[Tensor], Tensor]] = [
        strided,
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: x.movedim(-1, 0).contiguous().movedim(0, -1),
    ]
    straight = check(mask, dtype, seed, sink=sink)
    x = random_inputs(mask, 4, 2, 8, 6, dtype=dtype, seed=seed, nan_in_unused=True)
    for layout in layouts:
        q, k, v, dout, dlse = map(layout, x)
        other = run(q, k, v, mask, sink=layout(sink), dout=dout, dlse=dlse)
        for a, b in zip(straight, other, strict=True):
            assert torch.equal(a, b)
    # Memory shared by all heads or all rows.
    x = random_inputs(mask, 4, 4, 8, dtype=dtype, seed=seed)
    shared = [x.query[:, :1].expand(-1, 4, -1), x.key[:1].expand(16, -1, -1), x.value[:, :1].expand(-1, 4, -1)]
    shared.append(x.dout[:1, :1].expand(16, 4, 8))
    results = [run(*inputs, mask, dout=dout) for *inputs, dout in (shared, [y.contiguous() for y in shared])]
    for a, b in zip(*results, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("sq", "sk"), [(0, 0), (0, 5), (5, 0), (1, 1)])
def test_no_rows_and_no_keys(sq: int, sk: int, dtype: torch.dtype, seed: int) -> None:
    for sink in (None, torch.randn(2, 4), torch.randn(sq, 2, 4)):
        result = check(masks.full(sq, sk), dtype, seed, sink=sink)
        if not sk:
            assert (result.out == 0).all() and (result.max_logits == -math.inf).all() and (result.dq == 0).all()
        if not sq:
            assert (result.dk == 0).all() and (result.dv == 0).all()
        if sink is not None:
            assert result.dsink.shape == sink.shape


@pytest.mark.parametrize("per_row", [False, True])
def test_sinks_that_add_nothing(per_row: bool, seed: int) -> None:
    """No sink tokens, and sink logits of -inf, are as no sink."""
    mask = NAMED["causal_more_queries"]
    x = random_inputs(mask, 2, 2, 8, dtype=torch.float32, seed=seed)
    plain = run(*x[:3], mask, dout=x.dout, dlse=x.dlse)
    for tokens in (0, 2):
        sink = torch.full((mask.shape[0], tokens, 2) if per_row else (tokens, 2), -math.inf)
        result = run(*x[:3], mask, sink=sink, dout=x.dout, dlse=x.dlse)
        for a, b in zip(plain[:6], result[:6], strict=True):
            assert torch.equal(a, b)
        assert result.dsink.shape == sink.shape and (result.dsink == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_out_float32_is_out_before_it_is_rounded(dtype: torch.dtype, seed: int) -> None:
    mask = NAMED["document"]
    x = random_inputs(mask, 4, 2, dtype=dtype, seed=seed)
    plan = make_attn_plan(mask, 4, 2, 8, dtype=dtype)
    out, lse, most = flex_attn_fwd(*x[:3], plan, scale=0.3)
    wide, wide_lse, _ = flex_attn_fwd(*x[:3], plan, scale=0.3, out_float32=True)
    assert out.dtype == dtype and wide.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(wide.to(dtype), out) and torch.equal(lse, wide_lse)
    assert most.shape == (0,) and most.dtype == torch.float32
    # As exact as float32 allows, even for 16-bit inputs.
    truth = run_reference(*x[:3], mask, scale=0.3)
    low = run_lows(*(y.to(wide.dtype) for y in x[:3]), mask, scale=0.3)
    assert_close_to_truth(wide, truth.out, [y.out for y in low], wide.dtype, name="out")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backward_operator(dtype: torch.dtype, seed: int) -> None:
    mask = NAMED["document"]
    x = random_inputs(mask, 4, 2, dtype=dtype, seed=seed)
    plan = make_attn_plan(mask, 4, 2, 8, dtype=dtype)
    wide_type = torch.float64 if dtype == torch.float64 else torch.float32
    sink = torch.randn(3, 4)
    out, lse, _ = flex_attn_fwd(*x[:3], plan, scale=0.3, sink=sink)

    def backward(dlse: Tensor | None = x.dlse, before: Tensor | None = None, wide: bool = False) -> Any:
        return OPS.flex_attn_bwd(
            x.dout, dlse, *x[:3], out, lse, before, plan, 0, sink, 0.3, 0.0, wide, False, "auto", 0
        )  # fmt: skip

    grads = backward()
    by_autograd = run(*x[:3], mask, dout=x.dout, dlse=x.dlse, scale=0.3, sink=sink)
    for a, b in zip(grads, by_autograd[3:], strict=True):
        assert torch.equal(a, b)
    # Unrounded gradients.
    wide = backward(wide=True)
    assert [g.dtype for g in wide] == [wide_type] * 3 + [torch.float32]
    for a, b in zip(wide, grads, strict=True):
        assert torch.equal(a.to(b.dtype), b)
    # dq_before is added to dq, and left alone.
    before = torch.randn(16, 4, 8, dtype=wide_type)
    kept = before.clone()
    summed = backward(before=before, wide=True)
    assert torch.equal(before, kept) and torch.equal(summed[0], wide[0] + before)
    assert all(torch.equal(a, b) for a, b in zip(summed[1:], wide[1:], strict=True))
    # No gradient of lse is one of zeros.
    for a, b in zip(backward(None), backward(torch.zeros_like(lse)), strict=True):
        assert torch.equal(a, b)


def test_gradients_of_lse_alone_and_of_out_alone(seed: int) -> None:
    mask = NAMED["prefix_lm"]
    x = random_inputs(mask, 2, 1, dtype=torch.float64, seed=seed)
    for options in ({"dlse": x.dlse}, {"dout": x.dout}):
        check_attention(run, *x[:3], mask, sink=torch.randn(2, 2), **options)


def test_max_logits_have_no_gradient() -> None:
    q = normal(4, 2, 8, grad=True)
    out, lse, most = attention(q, q, q, masks.causal(4), scale=1.0, softcap=0.0, sink=None)
    assert out.requires_grad and lse.requires_grad and not most.requires_grad


def test_gradcheck(seed: int) -> None:
    torch.manual_seed(seed)
    for mask in (masks.causal(4, 2), NAMED["overlapping_slices"].clip((2, 6), (1, 6)), masks.chunk_causal(5, 5, 2)):
        sq, sk = mask.shape
        shapes = ((sq, 2, 3), (sk, 1, 3), (sk, 1, 2))
        inputs = [normal(*shape, dtype=torch.float64, grad=True) for shape in shapes]
        for sink, softcap in ((None, 0.0), (torch.randn(2, 2), 1.5), (torch.randn(sq, 1, 2), 0.0)):

            def function(
                q: Tensor, k: Tensor, v: Tensor, mask: Any = mask, sink: Any = sink, cap: Any = softcap
            ) -> Any:
                out, lse, _ = attention(q, k, v, mask, scale=0.7, softcap=cap, sink=sink)
                return out, torch.where(lse.isinf(), 0.0, lse)

            assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize("threads", [1, 2])
def test_same_bits_every_time(threads: int, seed: int) -> None:
    mask = masks.document([0, 50, 200])
    x = random_inputs(mask, 4, 2, dtype=torch.float32, seed=seed)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        first, *others = [run(*x[:3], mask, dout=x.dout, sink=torch.ones(1, 4)) for _ in range(5)]
    finally:
        torch.set_num_threads(before)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_the_check_notices_a_wrong_mask(seed: int) -> None:
    """Negative control."""
    mask = NAMED["causal"]
    x = random_inputs(mask, 2, 1, dtype=torch.float32, seed=seed)
    wrong = mask - AttnMask.from_slices([[9, 10]], [[3, 4]], ["full"], 16, 16)

    def other_mask(query: Tensor, key: Tensor, value: Tensor, _: AttnMask, **options: Any) -> Any:
        return run(query, key, value, wrong, **options)

    with pytest.raises(AssertionError, match="out is off"):
        check_attention(other_mask, *x[:3], mask, dout=x.dout)
    with pytest.raises(AssertionError):
        count_probe(other_mask, mask)


def test_a_plan_fits_an_equal_share_of_its_heads() -> None:
    plan = make_attn_plan(masks.causal(16), 6, 3, 8, dtype=torch.float32)
    x = random_inputs(plan.mask, 6, 3, 8, dtype=torch.float32, seed=0)
    whole = flex_attn_fwd(x.query, x.key, x.value, plan, scale=1.0)[0]
    share = flex_attn_fwd(x.query[:, 2:4], x.key[:, 1:2], x.value[:, 1:2], plan, scale=1.0)[0]
    assert torch.equal(share, whole[:, 2:4])
    for heads_q, heads_kv in ((3, 3), (2, 2), (4, 2), (12, 6), (0, 0)):
        x = random_inputs(plan.mask, heads_q, heads_kv, 8, dtype=torch.float32, seed=0)
        with pytest.raises(ValueError, match=rf"query must have shape \[16, 6, 8\] .* got \[16, {heads_q}, 8\]"):
            flex_attn_fwd(x.query, x.key, x.value, plan, scale=1.0)


# --- refusals ---

PLAN = make_attn_plan(masks.causal(8), 4, 2, 16, head_dim_v=12, dtype=torch.float32)
Q, K, V = torch.zeros(8, 4, 16), torch.zeros(8, 2, 16), torch.zeros(8, 2, 12)
REFUSALS: list[tuple[str, type[Exception], str, dict[str, Any]]] = [
    ("rows", ValueError, r"query must have shape \[8, 4, 16\] .* got \[7, 4, 16\]; make a plan", {"q": Q[:7]}),
    ("heads", ValueError, r"query must have shape \[8, 4, 16\] .* got \[8, 2, 16\]", {"q": Q[:, :2]}),
    ("keys", ValueError, r"key must have shape \[8, 2, 16\] .* got \[9, 2, 16\]", {"k": torch.zeros(9, 2, 16)}),
    ("values", ValueError, r"value must have shape \[8, 2, 12\] .* got \[8, 2, 16\]", {"v": K}),
    ("dtype", TypeError, "query must be torch.float32 as the plan says, got torch.float64", {"q": Q.double()}),
    ("mixed dtypes", TypeError, "value must be torch.float32 as the plan says, got torch.float16", {"v": V.half()}),
    ("backend", NotImplementedError, "got backend 'sm90', float32 tensors on cpu", {"backend": "sm90"}),
    ("interpreter", NotImplementedError, "got backend 'triton', float32 tensors on cpu", {"backend": "triton"}),
    ("sink dtype", RuntimeError, "sink must be float32", {"sink": torch.zeros(1, 4).double()}),
    ("sink heads", RuntimeError, r"sink must have shape \[1, 4\], got \[1, 2\]", {"sink": torch.zeros(1, 2)}),
    ("sink rows", RuntimeError, r"sink must have shape \[8, 1, 4\], got \[7, 1, 4\]", {"sink": torch.zeros(7, 1, 4)}),
]  # fmt: skip


@pytest.mark.parametrize(("error", "text", "change"), [r[1:] for r in REFUSALS], ids=[r[0] for r in REFUSALS])
@pytest.mark.parametrize("grad", [False, True])
def test_refusals(error: type[Exception], text: str, change: dict[str, Any], grad: bool) -> None:
    arguments: dict[str, Any] = {"q": Q, "k": K, "v": V, "plan": PLAN, "scale": 1.0} | change
    if grad:
        arguments["q"] = arguments["q"].clone().requires_grad_()
    with pytest.raises(error, match=text):
        flex_attn_fwd(**arguments)


def test_a_plan_of_ranks_says_whose_rows_it_wants() -> None:
    plan = make_attn_plan(masks.causal(8), 4, 2, 16, dtype=torch.float32, cp_size=2, cp_rank=1)
    with pytest.raises(ValueError, match=r"got \[8, 4, 16\].*\(rank 1 of 2 holds 4 rows\)"):
        flex_attn_fwd(Q, K, K, plan, scale=1.0)


TILES = PLAN.stages[0].tiles("q", 64, 64, CPU)
KEY_TILES = PLAN.stages[0].tiles("k", 64, 64, CPU)
FORWARD = dict(
    q=Q, k=K, v=V, items=TILES[0], runs=TILES[1], bands=TILES[2], sink=None, tile_rows=64, tile_cols=64, scale=1.0,
    softcap=0.0, out_float32=False, return_max_logits=False,
)  # fmt: skip
OUT, LSE = torch.zeros(8, 4, 12), torch.zeros(8, 4)
BACKWARD = dict(
    dout=OUT, dlse=None, q=Q, k=K, v=V, out=OUT, lse=LSE, q_items=TILES[0], q_runs=TILES[1], q_bands=TILES[2],
    k_items=KEY_TILES[0], k_runs=KEY_TILES[1], k_bands=KEY_TILES[2], sink=None, tile_shape=[64] * 4, scale=1.0,
    softcap=0.0, grad_float32=False,
)  # fmt: skip
LAYOUT_REFUSALS: list[tuple[str, str, dict[str, Any]]] = [
    ("q dimensions", r"q, k and v must be \[rows, heads, head_dim\], got \[8, 64\]", {"q": Q.flatten(1)}),
    ("head_dim", r"k must have shape \[8, 2, 12\], got \[8, 2, 16\]", {"q": OUT}),
    ("value rows", r"v must have shape \[8, 2, 12\], got \[7, 2, 12\]", {"v": V[:7]}),
    ("heads", "the heads of q must be a multiple of those of k, got 3 and 2", {"q": Q[:, :3]}),
    ("no heads", "the heads of q must be a multiple of those of k, got 4 and 0", {"k": K[:, :0], "v": V[:, :0]}),
    ("mixed dtypes", "q, k and v must have one dtype", {"k": K.double()}),
    ("integers", "float64, float32, bfloat16 and float16, got Int", {"q": Q.int(), "k": K.int(), "v": V.int()}),
    ("sink dtype", "sink must be float32", {"sink": torch.zeros(1, 4).half()}),
]
FORWARD_REFUSALS = [
    ("tile rows", "CPU tiles have 1 to 64 rows and columns, got 128 x 64", {"tile_rows": 128}),
    ("tile columns", "CPU tiles have 1 to 64 rows and columns, got 64 x 0", {"tile_cols": 0}),
    ("items dtype", r"items must be a contiguous int32 tensor \[n, 8\]", {"items": TILES[0].long()}),
    ("runs width", r"runs must be a contiguous int32 tensor \[n, 4\], got shape \[\d+, 8\]", {"runs": TILES[0]}),
    ("bands", r"bands must be a contiguous int32 tensor \[n, 8\], got shape \[8\]", {"bands": TILES[2][0]}),
]
BACKWARD_REFUSALS = [
    ("dout shape", r"dout must have shape \[8, 4, 12\], got \[8, 4, 16\]", {"dout": Q}),
    ("dout dtype", "dout and out must have the dtype of q", {"dout": OUT.double()}),
    ("out shape", r"out must have shape \[8, 4, 12\], got \[7, 4, 12\]", {"out": OUT[:7]}),
    ("out dtype", "dout and out must have the dtype of q", {"out": OUT.half()}),
    ("lse shape", r"lse must have shape \[8, 4\], got \[8, 2\]", {"lse": LSE[:, :2]}),
    ("lse dtype", "lse must be float32, or float64 for float64 inputs", {"lse": LSE.double()}),
    ("dlse shape", r"dlse must have shape \[8, 4\], got \[4, 4\]", {"dlse": LSE[:4]}),
    ("dlse dtype", "dlse must have the dtype of lse", {"dlse": LSE.double()}),
    ("tile shape", "tile_shape must hold 4 numbers, got 2", {"tile_shape": [64, 64]}),
    ("key tiles", r"items must be a contiguous int32 tensor \[n, 8\]", {"k_items": KEY_TILES[0].long()}),
]


@pytest.mark.parametrize(
    ("op", "arguments", "text", "change"),
    [
        pytest.param(op, arguments, *refusal[1:], id=f"{op} {refusal[0]}")
        for op, arguments, table in (
            ("flex_attn_fwd_tiles", FORWARD, LAYOUT_REFUSALS + FORWARD_REFUSALS),
            ("flex_attn_bwd_tiles", BACKWARD, LAYOUT_REFUSALS + BACKWARD_REFUSALS),
        )
        for refusal in table
    ],
)
def test_layout_refusals(op: str, arguments: dict[str, Any], text: str, change: dict[str, Any]) -> None:
    getattr(OPS, op)(**arguments)
    with pytest.raises(RuntimeError, match=text):
        getattr(OPS, op)(**(arguments | change))


def test_transforms_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="flex_attn_fwd cannot be vmapped; put the batch into the rows"):
        torch.vmap(lambda q: flex_attn_fwd(q, K, V, PLAN, scale=1.0))(Q[None])
    with pytest.raises(NotImplementedError, match="no forward-mode"):
        torch.func.jvp(lambda q: flex_attn_fwd(q, K, V, PLAN, scale=1.0)[0], (Q,), (Q,))
    q = Q.clone().requires_grad_()
    out, _, _ = flex_attn_fwd(q, K, V, PLAN, scale=1.0)
    with pytest.raises(NotImplementedError, match="no second derivatives; call backward with create_graph=False"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


# --- merging with an earlier result ---


@pytest.mark.parametrize("name", ["overlapping_slices", "causal", "document"])
def test_keys_in_two_calls_are_keys_in_one(name: str) -> None:
    """Attention over some keys, merged in the operator onto that over the others; gradients of everything."""
    mask = NAMED[name]
    rows, keys = mask.shape
    x = random_inputs(mask, 4, 2, 8, dtype=torch.float64, seed=0)
    sink, middle = torch.randn(2, 4, dtype=torch.float32), keys // 2
    q, k, v = (t.requires_grad_() for t in (x.query, x.key, x.value))
    dout, dlse = torch.randn(rows, 4, 8, dtype=torch.float64), torch.randn(rows, 4, dtype=torch.float64)

    def attend(k: Tensor, v: Tensor, part: AttnMask, **options: Any) -> tuple[Tensor, Tensor]:
        plan = make_attn_plan(part, 4, 2, 8, dtype=torch.float64)
        out, lse, _ = flex_attn_fwd(q, k, v, plan, scale=0.3, **options)
        return out, lse

    def gradients(out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        seen = torch.isfinite(lse)
        return torch.autograd.grad((out * dout).sum() + (lse * dlse)[seen].sum(), (q, k, v))

    whole = attend(k, v, mask, sink=sink)
    before = attend(k[:middle], v[:middle], mask.clip((0, rows), (0, middle)), sink=sink)
    merged = attend(
        k[middle:], v[middle:], mask.clip((0, rows), (middle, keys)), out_before=before[0], lse_before=before[1]
    )
    for found, expected in zip((*merged, *gradients(*merged)), (*whole, *gradients(*whole)), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_an_earlier_result_is_refused_in_words() -> None:
    mask = masks.causal(4)
    x = random_inputs(mask, 4, 2, 8, dtype=torch.bfloat16, seed=0)
    plan = make_attn_plan(mask, 4, 2, 8)
    out, lse = torch.zeros(4, 4, 8), torch.zeros(4, 4)
    for before, error, text in (
        ((out, None), ValueError, "give both or neither"),
        ((out[:3], lse), ValueError, r"out_before must have shape \[4, 4, 8\], got \[3, 4, 8\]"),
        ((out, lse[:, :2]), ValueError, r"lse_before must have shape \[4, 4\], got \[4, 2\]"),
        ((out.bfloat16(), lse), TypeError, "out_before must be torch.float32, got torch.bfloat16"),
    ):
        with pytest.raises(error, match=text):
            flex_attn_fwd(x.query, x.key, x.value, plan, scale=1.0, out_before=before[0], lse_before=before[1])
