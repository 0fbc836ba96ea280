"""Probes that see a wrong mask where random inputs cannot, at any length, without a dense mask.

A slightly wrong mask disappears in the rounding of a long row. These inputs make it visible: with q = 0 every
visible key weighs the same, so lse is the logarithm of their number, out the mean of their codes, and dv the
sum of the codes of the rows that see a key.
"""

from __future__ import annotations

import numpy as np
import torch

from torch_magi.masks import AttnMask
from torch_magi.testing.reference import Results, Runner

Tensor = torch.Tensor
LSE_TOLERANCE = 1e-5


def count_probe(
    runner: Runner,
    mask: AttnMask,
    num_heads_q: int = 2,
    num_heads_kv: int = 1,
    head_dim: int = 8,
    head_dim_v: int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    backward: bool = True,
) -> None:
    """Check which keys every row sees, and which rows see every key.

    lse[r] = ln(number of keys that row r sees) to 1e-5. out shows which keys: values are random integers.
    dv shows which rows: dout holds random integers times the row's number of keys. No gradient reaches k.

    Args:
        runner: what is tested; see `reference.make_runner`.
        mask: what it should attend; of any length.
        num_heads_q, num_heads_kv, head_dim, head_dim_v, dtype, device: of the inputs.
        seed: of the codes.
        backward: also look at the gradients.

    Raises:
        AssertionError: naming a row or key and what it sees.
    """
    rng = np.random.default_rng(seed)
    sq, sk = mask.shape
    groups, dim_v = num_heads_q // num_heads_kv, head_dim if head_dim_v is None else head_dim_v
    counts, _ = _sums_over_visible(mask, np.zeros((sk, 1)))
    key_codes = _codes(rng, (sk, num_heads_kv, dim_v))
    # The codes of rows with many keys must not drown those of rows with few: each weighs 1 / count in dv.
    most = max(float(counts.max(initial=0)), 1.0)
    largest = 2.0 ** np.ceil(np.log2(most))
    row_codes = _codes(rng, (sq, num_heads_q, dim_v)) * (counts / largest)[:, None, None]

    def tensor(x: np.ndarray) -> Tensor:
        return torch.from_numpy(x).to(device, dtype)

    dout = tensor(row_codes)
    key = torch.from_numpy(rng.standard_normal((sk, num_heads_kv, head_dim))).to(device, dtype)
    query = torch.zeros(sq, num_heads_q, head_dim, dtype=dtype, device=device)
    results = runner(query, key, tensor(key_codes), mask, **({"dout": dout} if backward else {}))

    _check_counts(results, counts)
    _, key_sums = _sums_over_visible(mask, key_codes.reshape(sk, num_heads_kv * dim_v))
    means = key_sums.reshape(sq, num_heads_kv, dim_v) / np.maximum(counts, 1)[:, None, None]
    eps = torch.finfo(dtype).eps
    exact = np.repeat(means, groups, 1)
    _check("out", "row", "keys", results.out, exact, eps * np.abs(exact) + LSE_TOLERANCE)

    if not backward:
        return
    assert results.dk is not None and results.dv is not None
    rounded = dout.double().cpu().numpy() / np.maximum(counts, 1)[:, None, None]
    flat = rounded.reshape(sq, num_heads_q * dim_v)
    _, row_sums = _sums_over_visible(mask.T, np.concatenate([flat, flat**2], 1))
    row_sums = row_sums.reshape(sk, 2, num_heads_kv, groups, dim_v).sum(3)
    # The probabilities are rounded to the inputs' dtype, each with its own error: it adds up like noise.
    slack = 4 * eps * np.sqrt(row_sums[:, 1]) + eps * np.abs(row_sums[:, 0]) + LSE_TOLERANCE * 8 / largest
    _check("dv", "key", "rows", results.dv, row_sums[:, 0], slack)
    if results.dk.count_nonzero():
        raise AssertionError("dk must be 0 where q is 0, and is not")


def _codes(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return random integers of magnitude 4 to 8: exact in every dtype, and none of them small."""
    codes: np.ndarray = rng.integers(4, 9, shape) * rng.choice([-1.0, 1.0], shape)
    return codes


def _sums_over_visible(mask: AttnMask, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for every row of a mask the number of keys it sees, and the sum of their values [keys, n]."""
    offsets, intervals = mask.row_intervals()
    rows = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    counts = np.zeros(mask.shape[0])
    np.add.at(counts, rows, (intervals[:, 1] - intervals[:, 0]).astype(float))
    before = np.concatenate([np.zeros((1, values.shape[1])), np.cumsum(values, 0)])
    sums = np.zeros((mask.shape[0], values.shape[1]))
    np.add.at(sums, rows, before[intervals[:, 1]] - before[intervals[:, 0]])
    return counts, sums


def _check_counts(results: Results, counts: np.ndarray) -> None:
    lse = results.lse.double().cpu().numpy()
    with np.errstate(divide="ignore"):
        exact = np.log(counts)[:, None]
    finite = np.isfinite(exact)
    close = np.where(finite, np.abs(lse - np.where(finite, exact, 0)) <= LSE_TOLERANCE, lse == exact)
    if not close.all():
        row, head = (int(i) for i in np.argwhere(~close)[0])
        raise AssertionError(
            f"row {row}, head {head} sees exp(lse) = {np.exp(lse[row, head]):.6g} keys instead of "
            f"{int(counts[row])}; {int((~close).any(1).sum())} of {len(lse)} rows see a wrong number"
        )
    if results.max_logits is not None:
        expected = 0.0 if counts.any() else -np.inf
        if not (results.max_logits == expected).all():
            raise AssertionError(f"max_logits must be {expected} where q is 0, got {results.max_logits.tolist()}")


def _check(name: str, what: str, others: str, actual: Tensor, exact: np.ndarray, slack: np.ndarray) -> None:
    found = actual.double().cpu().numpy()
    wrong = ~(np.abs(found - exact) <= slack)
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        count = int(wrong.any(tuple(range(1, wrong.ndim))).sum())
        raise AssertionError(
            f"{what} {at[0]} sees the wrong {others}: {name}{list(at)} is {found[at]:.9g} instead of "
            f"{exact[at]:.9g} (+- {slack[at]:.2g}); {count} of {len(wrong)} {what}s are wrong"
        )


def perturb_probe(
    runner: Runner,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttnMask,
    token: int,
    **options: object,
) -> None:
    """Check that another key and value of one token change the rows that see it, and no bit of any other.

    In float64 every row that sees the token must change; in other dtypes its weight may be lost in rounding.

    Args:
        runner: what is tested; see `reference.make_runner`.
        query, key, value, mask: as in `reference.reference_attention`.
        token: the key that is replaced.
        options: scale, softcap and sink.

    Raises:
        AssertionError: naming the rows that changed or did not.
    """
    before = runner(query, key, value, mask, **options)
    other_key, other_value = key.clone(), value.clone()
    other_key[token] = -2 * key[token] + 1
    other_value[token] = -3 * value[token] + 1
    after = runner(query, other_key, other_value, mask, **options)
    changed = (before.out != after.out).flatten(1).any(1) | (before.lse != after.lse).any(1)
    sees = torch.zeros(mask.shape[0], dtype=torch.bool)
    offsets, intervals = mask.row_intervals()
    rows = np.repeat(np.arange(mask.shape[0]), np.diff(offsets))
    sees[torch.from_numpy(rows[(intervals[:, 0] <= token) & (token < intervals[:, 1])])] = True
    changed = changed.cpu()
    wrong = (changed & ~sees).nonzero().flatten().tolist()
    if wrong:
        raise AssertionError(f"rows {wrong[:10]} do not see token {token}, but depend on it")
    missed = (sees & ~changed).nonzero().flatten().tolist()
    if missed and query.dtype == torch.float64:
        raise AssertionError(f"rows {missed[:10]} see token {token}, but ignore it")
