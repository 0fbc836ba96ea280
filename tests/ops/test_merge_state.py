"""merge_state: values, identities bit for bit, far-apart lse, gradients, refusals."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torch_magi import make_attn_plan, masks
from torch_magi.masks import AttnMask
from torch_magi.ops import flex_attn_fwd, merge_state
from torch_magi.testing import assert_close_to_truth, random_inputs, random_masks, run_lows, run_reference

Tensor = torch.Tensor
State = tuple[Tensor, Tensor]
WIDE = [torch.float32, torch.float64]


def some_state(seed: int, rows: int = 7, heads: int = 3, dim: int = 5, dtype: torch.dtype = torch.float64) -> State:
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(rows, heads, dim, generator=generator, dtype=torch.float64)
    return out.to(dtype), (3 * torch.randn(rows, heads, generator=generator, dtype=torch.float64)).to(dtype)


def empty_like(state: State, lse: float = -math.inf, out: float = 0.0) -> State:
    return torch.full_like(state[0], out), torch.full_like(state[1], lse)


def naive(states: list[State]) -> State:
    """Return the merge in the states' dtype, written down as a softmax over the states."""
    outs, lses = (torch.stack(x) for x in zip(*states, strict=True))
    lse = torch.logsumexp(lses, 0)
    weights = torch.where(lses == -math.inf, 0.0, torch.exp(lses - torch.where(lse == -math.inf, 0.0, lse)))
    return (weights[..., None] * outs).sum(0), lse


def assert_merged(actual: State, states: list[State]) -> None:
    truth = naive([(out.double(), lse.double()) for out, lse in states])
    low = naive(states)
    for name, x, y, z in zip(("out", "lse"), actual, truth, low, strict=True):
        assert x.dtype == states[0][0].dtype
        assert_close_to_truth(x, y, z, name=name)


def same_bits(a: State, b: State) -> bool:
    """Return whether all bits are equal, the sign of a zero included."""
    kinds = {torch.float32: torch.int32, torch.float64: torch.int64}
    return all(torch.equal(x.view(kinds[x.dtype]), y.view(kinds[y.dtype])) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_values(dtype: torch.dtype, seed: int) -> None:
    for i, shape in enumerate([(7, 3, 5), (1, 1, 1), (600, 2, 3), (3, 1, 128), (0, 2, 4), (4, 0, 4), (4, 2, 0)]):
        a, b = some_state(seed + 2 * i, *shape, dtype), some_state(seed + 2 * i + 1, *shape, dtype)
        merged = merge_state(*a, *b)
        assert merged[0].shape == shape and merged[1].shape == shape[:2]
        assert_merged(merged, [a, b])


@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_commutes(dtype: torch.dtype, seed: int) -> None:
    a, b = some_state(seed, dtype=dtype), some_state(seed + 1, dtype=dtype)
    assert same_bits(merge_state(*a, *b), merge_state(*b, *a))


def test_with_itself(seed: int) -> None:
    out, lse = some_state(seed)
    merged = merge_state(out, lse, out, lse)
    assert_close_to_truth(merged[0], out, None, name="out")
    assert_close_to_truth(merged[1], lse + math.log(2), None, name="lse")


@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_every_order_of_many_states(dtype: torch.dtype, seed: int) -> None:
    """Associativity: any order and any bracketing gives the softmax over all states, empty ones included."""
    states = [some_state(seed + i, dtype=dtype) for i in range(4)]
    states[2][1][1] = -math.inf
    states[2][0][1] = 0.0
    for i, j, k, l in itertools.permutations(range(4)):  # noqa: E741
        a, b, c, d = (states[n] for n in (i, j, k, l))
        assert_merged(merge_state(*merge_state(*merge_state(*a, *b), *c), *d), states)
        assert_merged(merge_state(*merge_state(*a, *b), *merge_state(*c, *d)), states)


# --- cases ---


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("mark", [-math.inf, math.inf])
def test_c02_empty_states(mark: float, dtype: torch.dtype, seed: int) -> None:
    """An empty side, also as FlashAttention-2 marks it with +inf, is the identity bit for bit."""
    state = some_state(seed, dtype=dtype)
    state[0][0, 0, :2] = torch.tensor([-0.0, 0.0])
    state[1][0, 0] = -0.0
    for garbage in (0.0, math.nan, math.inf):
        empty = empty_like(state, mark, garbage)
        assert same_bits(merge_state(*state, *empty), state)
        assert same_bits(merge_state(*empty, *state), state)
        for other in (-math.inf, math.inf):
            both = merge_state(*empty, *empty_like(state, other, garbage))
            assert same_bits(both, empty_like(state))
    empty = empty_like(state, mark)
    for order in set(itertools.permutations([0, 0, 1])):
        a, b, c = (state if n else empty for n in order)
        assert same_bits(merge_state(*merge_state(*a, *b), *c), state)
        assert same_bits(merge_state(*a, *merge_state(*b, *c)), state)


@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_c02_rows_are_empty_one_by_one(dtype: torch.dtype, seed: int) -> None:
    a, b = some_state(seed, dtype=dtype), some_state(seed + 1, dtype=dtype)
    whole = merge_state(*a, *b)
    generator = torch.Generator().manual_seed(seed)
    gone_a, gone_b = (torch.rand(a[1].shape, generator=generator) < 0.4 for _ in range(2))
    for state, gone in ((a, gone_a), (b, gone_b)):
        state[0][gone] = math.nan
        state[1][gone] = -math.inf
    out, lse = merge_state(*a, *b)
    for expected, rows in (
        (whole, ~gone_a & ~gone_b),
        (a, ~gone_a & gone_b),
        (b, gone_a & ~gone_b),
        (empty_like(a), gone_a & gone_b),
    ):
        assert same_bits((out[rows], lse[rows]), (expected[0][rows], expected[1][rows]))


@pytest.mark.parametrize("marks", list(itertools.product([None, -math.inf, math.inf], repeat=2)), ids=str)
def test_c02_gradients_of_empty_states(marks: tuple[float | None, float | None], seed: int) -> None:
    """The gradient of an empty side is 0, not NaN; the other side gets all of it."""
    states = [some_state(seed + i) for i in range(2)]
    states = [x if mark is None else empty_like(x, mark) for x, mark in zip(states, marks, strict=True)]
    inputs = [x.clone().requires_grad_() for state in states for x in state]
    out, lse = merge_state(*inputs)
    dout, dlse = (torch.randn_like(x) for x in (out, lse))
    grads = torch.autograd.grad((out, lse), inputs, (dout, dlse))
    for i, mark in enumerate(marks):
        if mark is not None:
            assert (grads[2 * i] == 0).all() and (grads[2 * i + 1] == 0).all()
        elif marks[1 - i] is not None:
            assert torch.equal(grads[2 * i], dout) and torch.equal(grads[2 * i + 1], dlse)


@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_c03_far_apart_lse(dtype: torch.dtype) -> None:
    for low, high in ((-200.0, 200.0), (-1e4, 1e4), (0.0, 1e30), (-1e30, 0.0), (-3e38, 3e38)):
        for order in (1, -1):
            values = [low, high][::order]
            outs = [torch.full((2, 1, 3), float(i + 1), dtype=dtype, requires_grad=True) for i in range(2)]
            lses = [torch.full((2, 1), x, dtype=dtype, requires_grad=True) for x in values]
            out, lse = merge_state(outs[0], lses[0], outs[1], lses[1])
            winner = values.index(high)
            assert torch.equal(lse, lses[winner]) and torch.equal(out, outs[winner])  # weights 0 and 1
            (out.sum() + lse.sum()).backward()
            for i in range(2):
                # exp(-400) is 0 in float32 only.
                bound = 8 * math.exp(low - high) if dtype == torch.float64 else 0.0
                for x in (outs[i].grad, lses[i].grad):
                    assert x is not None and (x - float(i == winner)).abs().max() <= bound


def test_large_lse_that_are_close(seed: int) -> None:
    """The weights depend on the difference of the lse alone."""
    a, b = some_state(seed), some_state(seed + 1)
    a, b = ((out, lse.round()) for out, lse in (a, b))
    plain = merge_state(*a, *b)
    for shift in (-(2.0**40), 2.0**40):
        out, lse = merge_state(a[0], a[1] + shift, b[0], b[1] + shift)
        assert torch.equal(out, plain[0])
        assert torch.equal(lse, plain[1] + shift)


def test_c34_lse_stays_natural_after_merges() -> None:
    """Zero logits: lse is the logarithm of the number of keys, whatever the order of the merges."""
    state = torch.zeros(1, 1, 1), torch.full((1, 1), -math.inf)
    seen = 0
    for keys in (1, 5, 0, 10, 84):
        part = torch.full((1, 1, 1), float(keys)), torch.full((1, 1), keys).float().log()
        state = merge_state(*state, *part)
        seen += keys
        assert state[1].item() == pytest.approx(math.log(seen), abs=1e-5)
    assert state[0].item() == pytest.approx((1 * 1 + 5 * 5 + 10 * 10 + 84 * 84) / 100, rel=1e-5)


# --- attention in parts ---


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_attention_over_parts_of_the_keys(dtype: torch.dtype, seed: int) -> None:
    """Merged, the attention over a partition of a mask is the attention over the mask."""
    generator = torch.Generator().manual_seed(seed)
    for i, mask in enumerate(random_masks(12, seed, max_size=20)):
        x = random_inputs(mask, 2, 1, dtype=dtype, seed=seed + i)
        colours = torch.randint(0, 3, mask.shape, generator=generator)
        state: State | None = None
        for colour in range(3):
            part = mask & AttnMask.from_dense(colours == colour)
            plan = make_attn_plan(part, 2, 1, 8, dtype=dtype)
            out, lse, _ = flex_attn_fwd(*x[:3], plan, scale=0.3, out_float32=True)
            state = (out, lse) if state is None else merge_state(*state, out, lse)
        assert state is not None
        truth = run_reference(*x[:3], mask, scale=0.3)
        low = run_lows(*(y.to(state[0].dtype) for y in x[:3]), mask, scale=0.3)
        rule = state[0].dtype  # nothing is rounded to 16 bits on the way
        assert_close_to_truth(state[0], truth.out, [r.out for r in low], rule, name="out")
        assert_close_to_truth(state[1], truth.lse, [r.lse for r in low], rule, name="lse")


# --- gradients and layout ---


def test_gradcheck(seed: int) -> None:
    inputs = [x.requires_grad_() for i in range(2) for x in some_state(seed + i, 3, 2, 2)]
    assert torch.autograd.gradcheck(merge_state, inputs)
    assert torch.autograd.gradgradcheck(merge_state, inputs)
    assert torch.autograd.gradcheck(lambda *x: merge_state(*x)[1], inputs)
    assert torch.autograd.gradcheck(lambda *x: merge_state(*x)[0], inputs)
    some = [x.detach() if i in (0, 3) else x for i, x in enumerate(inputs)]
    assert torch.autograd.gradcheck(merge_state, some)


def test_gradcheck_of_a_chain(seed: int) -> None:
    inputs = [x.requires_grad_() for i in range(3) for x in some_state(seed + i, 2, 1, 2)]

    def chain(a: Tensor, la: Tensor, b: Tensor, lb: Tensor, c: Tensor, lc: Tensor) -> State:
        empty = torch.zeros_like(a), torch.full_like(la, -math.inf)
        return merge_state(*merge_state(*merge_state(*empty, a, la), b, lb), c, lc)

    assert torch.autograd.gradcheck(chain, inputs)


def test_garbage_in_the_gradient_of_a_row_that_sees_nothing(seed: int) -> None:
    """Contract 1.8 and 2.3: such rows may hold any bits, and their gradients are exactly 0."""
    inputs = [x.requires_grad_() for _ in range(2) for x in empty_like(some_state(seed))]
    out, lse = merge_state(*inputs)
    grads = torch.autograd.grad((out, lse), inputs, (torch.full_like(out, math.nan), torch.full_like(lse, math.nan)))
    assert all((grad == 0).all() for grad in grads)


@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_c40_strided_inputs(dtype: torch.dtype, seed: int) -> None:
    a, b = some_state(seed, dtype=dtype), some_state(seed + 1, dtype=dtype)
    expected = merge_state(*a, *b)
    layouts: list[Callable[[Tensor], Tensor]] = [
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: x.movedim(-1, 0).contiguous().movedim(0, -1),
        lambda x: torch.stack([x, torch.full_like(x, math.nan)], -1)[..., 0],
    ]
    for layout in layouts:
        assert same_bits(merge_state(*map(layout, a), *map(layout, b)), expected)
    shared = a[0][:, :1].expand_as(a[0]), a[1][:1].expand_as(a[1])
    assert same_bits(merge_state(*shared, *b), merge_state(*(x.contiguous() for x in shared), *b))


def test_inputs_stay_as_they_are(seed: int) -> None:
    inputs = [*some_state(seed), *some_state(seed + 1)]
    kept = [x.clone() for x in inputs]
    out, _ = merge_state(*inputs)
    out.fill_(7)
    merge_state(*empty_like((inputs[0], inputs[1])), *inputs[2:])[0].fill_(7)  # the identity is a copy
    assert all(torch.equal(x, y) for x, y in zip(inputs, kept, strict=True))


def test_same_bits_every_time(seed: int) -> None:
    a, b = some_state(seed, 3000), some_state(seed + 1, 3000)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 2):
            torch.set_num_threads(threads)
            results.append(merge_state(*a, *b))
    finally:
        torch.set_num_threads(before)
    assert same_bits(results[0], results[1]) and same_bits(results[0], results[2])


def test_the_check_notices_a_wrong_merge(seed: int) -> None:
    """Negative control: weights that forget one state, and lse in bits."""
    a, b = some_state(seed), some_state(seed + 1)
    out, lse = merge_state(*a, *b)
    with pytest.raises(AssertionError, match="out is off"):
        assert_merged((a[0], lse), [a, b])
    with pytest.raises(AssertionError, match="lse is off"):
        assert_merged((out, lse / math.log(2)), [a, b])


# --- refusals ---

OUT, LSE = torch.zeros(4, 2, 8), torch.zeros(4, 2)
REFUSALS: list[tuple[str, str, dict[str, Any]]] = [
    ("dimensions", r"out_a must be \[rows, heads, head_dim\], got \[4, 16\]", {"out_a": OUT.flatten(1)}),
    ("rows", r"out_b must have shape \[4, 2, 8\], got \[3, 2, 8\]", {"out_b": OUT[:3]}),
    ("head_dim", r"out_b must have shape \[4, 2, 8\], got \[4, 2, 4\]", {"out_b": OUT[..., :4]}),
    ("lse_a heads", r"lse_a must have shape \[4, 2\], got \[4, 1\]", {"lse_a": LSE[:, :1]}),
    ("lse_b transposed", r"lse_b must have shape \[4, 2\], got \[2, 4\]", {"lse_b": LSE.T}),
    ("bfloat16", "needs float32 or float64 partial results, got BFloat16; ask the attention for out_float32=True",
     {"out_a": OUT.bfloat16(), "out_b": OUT.bfloat16()}),
    ("integers", "needs float32 or float64 partial results, got Long", {"out_a": OUT.long()}),
    ("mixed out", "must have one dtype", {"out_b": OUT.double()}),
    ("mixed lse_a", "must have one dtype", {"lse_a": LSE.double()}),
    ("mixed lse_b", "must have one dtype", {"lse_b": LSE.half()}),
]  # fmt: skip


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(("text", "change"), [r[1:] for r in REFUSALS], ids=[r[0] for r in REFUSALS])
def test_refusals(text: str, change: dict[str, Tensor], grad: bool) -> None:
    arguments = {"out_a": OUT, "lse_a": LSE, "out_b": OUT, "lse_b": LSE} | change
    if grad:
        arguments = {n: x.clone().requires_grad_(x.is_floating_point()) for n, x in arguments.items()}
    with pytest.raises(RuntimeError, match=text):
        merge_state(**arguments)


def test_forward_mode_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"no forward-mode derivatives \(jvp\); use backward"):
        torch.func.jvp(lambda x: merge_state(x, LSE, OUT, LSE)[0], (OUT,), (OUT,))


def test_empty_rows_of_a_mask_stay_empty() -> None:
    """C04 at this level: stages that see nothing leave (0, -inf)."""
    mask = masks.full(4, 3) - masks.full(4, 3)
    x = random_inputs(mask, dtype=torch.float32, seed=0, nan_in_unused=True)
    out, lse, _ = flex_attn_fwd(*x[:3], make_attn_plan(mask, 2, 1, 8, dtype=torch.float32), scale=1.0, out_float32=True)
    assert same_bits(merge_state(out, lse, out, lse), empty_like((out, lse)))
