"""AttnMask: a set of visible (q, k) pairs, as an immutable value.

Inside it is a list of disjoint bands (csrc/planner/planner.h). Their normal form depends on the set alone, so
two masks that show the same pairs are equal, hash alike and pickle alike, however they were written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, overload

import numpy as np
import torch

from torch_magi import _planner
from torch_magi._torch_internals import untraced
from torch_magi.masks.mask_type import MaskType
from torch_magi.masks.ranges import Integers, check_length, range_array

INF: int = _planner.INF
MAX_LENGTH = 1 << 31  # areas fit in 64 bits
Bands = np.ndarray[Any, np.dtype[np.int64]]
MaskMod = Callable[..., torch.Tensor]
MaskGrid = tuple[tuple["AttnMask", ...], ...]


class AttnMask:
    """A set of visible (q, k) pairs of `shape[0]` queries and `shape[1]` keys.

    Make one with a constructor of `torch_magi.masks`, `from_slices` or `from_dense`. Masks combine as sets:
    `a & b`, `a | b`, `a - b`, `~a`; `a.T` exchanges queries and keys.

    Example:
        >>> from torch_magi import masks
        >>> m = masks.causal(4) | masks.AttnMask.from_slices([[0, 4]], [[0, 2]], ["full"], 4, 4)
        >>> print(m.to_string())
        ##..
        ##..
        ###.
        ####
        >>> m.area
        11
    """

    __slots__ = ("_area", "_bands", "_shape")

    _bands: Bands
    _shape: tuple[int, int]
    _area: int

    def __init__(self) -> None:
        raise TypeError(
            "AttnMask has no public initialiser; use a constructor of torch_magi.masks, AttnMask.from_slices or "
            "AttnMask.from_dense"
        )

    # --- making one --------------------------------------------------------------------------------------

    @classmethod
    @untraced
    def from_canonical_bands(cls, bands: Bands, sq: int, sk: int) -> AttnMask:
        """Return the mask of bands that are in normal form already.

        Raises:
            ValueError: if a length is negative or 2^31 or more.
        """
        if not (0 <= sq < MAX_LENGTH and 0 <= sk < MAX_LENGTH):
            raise ValueError(f"sq and sk must be in [0, 2^31), got {sq} and {sk}")
        mask = object.__new__(cls)
        bands = np.ascontiguousarray(bands, np.int64).reshape(-1, 7)
        bands.setflags(write=False)
        object.__setattr__(mask, "_bands", bands)
        object.__setattr__(mask, "_shape", (int(sq), int(sk)))
        object.__setattr__(mask, "_area", int(_planner.area(bands)))
        return mask

    @classmethod
    def from_bands(cls, bands: Bands, sq: int, sk: int) -> AttnMask:
        """Return the union of bands, int64 [n, 7]: q0, q1, k0, k1, dlo, dhi, step (planner.h)."""
        return cls.from_canonical_bands(_planner.normalize(bands), sq, sk)

    @classmethod
    @untraced
    def from_slices(
        cls, q_ranges: Integers, k_ranges: Integers, mask_types: Sequence[Any] | Integers, sq: int, sk: int
    ) -> AttnMask:
        """Return the union of attention slices.

        Args:
            q_ranges, k_ranges: [n, 2] half-open ranges; lists, numpy arrays or tensors of integers.
            mask_types: [n]; each a MaskType, its integer or its name ("full", "causal", ...).
            sq, sk: shape of the mask.

        Raises:
            TypeError, ValueError: for wrong shapes or types, reversed ranges, or ranges outside the mask.
        """
        sq, sk = check_length("sq", sq), check_length("sk", sk)
        q = range_array("q_ranges", q_ranges, sq)
        k = range_array("k_ranges", k_ranges, sk)
        kinds = mask_types.tolist() if isinstance(mask_types, (np.ndarray, torch.Tensor)) else list(mask_types)
        if not len(q) == len(k) == len(kinds):
            raise ValueError(
                f"q_ranges, k_ranges and mask_types must have the same length, got {len(q)}, {len(k)}, {len(kinds)}"
            )
        types = np.array([MaskType.parse(t) for t in kinds], np.int64)
        bands = np.empty((len(q), 7), np.int64)
        bands[:, 0:2], bands[:, 2:4] = q, k
        bands[:, 4] = np.where(types & MaskType.INV_CAUSAL, k[:, 0] - q[:, 0], -INF)
        bands[:, 5] = np.where(types & MaskType.CAUSAL, k[:, 1] - q[:, 1] + 1, INF)
        bands[:, 6] = 1
        return cls.from_bands(bands, sq, sk)

    @classmethod
    @untraced
    def from_dense(cls, mask: Any) -> AttnMask:
        """Return the mask of a boolean matrix [sq, sk], exactly. Tensor, numpy array or nested lists.

        Raises:
            TypeError: if the matrix is not boolean.
            ValueError: if it is not a matrix.
        """
        array = mask.detach().cpu().numpy() if isinstance(mask, torch.Tensor) else np.asarray(mask)
        if array.ndim != 2:
            raise ValueError(f"a dense mask must be a matrix [sq, sk], got shape {array.shape}")
        if array.dtype != np.bool_:
            raise TypeError(f"a dense mask must be boolean, got {array.dtype}; compare it (mask != 0) first")
        return cls.from_canonical_bands(_planner.from_dense(np.ascontiguousarray(array)), *array.shape)

    @overload
    @classmethod
    def from_mask_mod(
        cls, mask_mod: MaskMod, q_len: int, kv_len: int, *, B: None = None, H: None = None,
        device: torch.device | str = "cpu",
    ) -> AttnMask: ...  # fmt: skip

    @overload
    @classmethod
    def from_mask_mod(
        cls, mask_mod: MaskMod, q_len: int, kv_len: int, *, B: int, H: int | None = None,
        device: torch.device | str = "cpu",
    ) -> MaskGrid: ...  # fmt: skip

    @overload
    @classmethod
    def from_mask_mod(
        cls, mask_mod: MaskMod, q_len: int, kv_len: int, *, B: None = None, H: int, device: torch.device | str = "cpu"
    ) -> MaskGrid: ...

    @classmethod
    @untraced
    def from_mask_mod(
        cls, mask_mod: MaskMod, q_len: int, kv_len: int, *, B: int | None = None, H: int | None = None,
        device: torch.device | str = "cpu",
    ) -> AttnMask | MaskGrid:  # fmt: skip
        """Return the pairs that a FlexAttention `mask_mod` shows, exactly.

        Args:
            mask_mod: function of (b, h, q_idx, kv_idx) as for `create_block_mask`.
            q_len, kv_len: shape of the mask.
            B, H: elements of the batch and heads of a mask_mod that depends on them.
            device: where mask_mod is called; that of the tensors it captures.

        Returns:
            The mask; with B or H, masks[b][h], a tuple of B tuples of H masks (1 for the one not given), in which
            equal masks are one object. How the pairs were found is logged (see `masks.mask_mod`).

        Raises:
            TypeError: if mask_mod is no function, or what it returns is not boolean.
            ValueError: for wrong lengths, or if mask_mod computes with b or h and B or H was not given.

        Example:
            >>> import torch
            >>> document = torch.tensor([0, 0, 1, 1, 1])
            >>> def mask_mod(b, h, q_idx, kv_idx):
            ...     return (q_idx >= kv_idx) & (document[q_idx] == document[kv_idx])
            >>> AttnMask.from_mask_mod(mask_mod, 5, 5)
            AttnMask(5 x 5, area 9, 2 bands)
        """
        from torch_magi.masks.mask_mod import from_mask_mod

        return from_mask_mod(mask_mod, q_len, kv_len, B=B, H=H, device=device)

    @classmethod
    @untraced
    def from_block_mask(cls, block_mask: Any, *, B: int | None = None, H: int | None = None) -> AttnMask | MaskGrid:
        """Return the pairs that a FlexAttention `BlockMask` shows, exactly.

        These are the pairs of its full blocks, and those of its other listed blocks that its mask_mod shows, up to
        its `seq_lengths`: what compiled `flex_attention` computes. (Without torch.compile it asks mask_mod only.)

        Args:
            block_mask: the BlockMask. mask_mod is called on its device.
            B, H: elements of the batch and heads that it is used for, where its own tables have one for all.

        Returns:
            The mask, where the BlockMask has one batch element and one head and neither B nor H is given; else
            masks[b][h], a tuple of B tuples of H masks, in which equal masks are one object.

        Raises:
            TypeError: if block_mask is none, or what its mask_mod returns is not boolean.
            ValueError: if its tables contradict its lengths, or B or H its tables.
            RuntimeError: from torch, if it was cut out of another one (block_mask[...]), which takes its mask_mod.

        Example:
            >>> AttnMask.from_block_mask(masks.causal(300).to_block_mask(128)) == masks.causal(300)
            True
        """
        from torch_magi.masks.block_mask import from_block_mask

        return from_block_mask(block_mask, B=B, H=H)

    # --- what it is --------------------------------------------------------------------------------------

    @property
    def bands(self) -> Bands:
        """int64 [n, 7], read-only, in normal form: q0, q1, k0, k1, dlo, dhi, step (planner.h)."""
        return self._bands

    @property
    def shape(self) -> tuple[int, int]:
        """Number of queries and of keys."""
        return self._shape

    @property
    def area(self) -> int:
        """Number of visible pairs."""
        return self._area

    def sparsity(self) -> float:
        """Return the share of pairs that are hidden; 0.0 for a mask without pairs."""
        pairs = self._shape[0] * self._shape[1]
        return 1.0 - self._area / pairs if pairs else 0.0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AttnMask):
            return NotImplemented
        return self._shape == other._shape and np.array_equal(self._bands, other._bands)

    def __hash__(self) -> int:
        return hash((self._shape, self._bands.tobytes()))

    def __reduce__(self) -> tuple[Any, ...]:
        return (AttnMask.from_canonical_bands, (np.array(self._bands), *self._shape))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"an AttnMask is immutable; cannot set {name!r}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"an AttnMask is immutable; cannot delete {name!r}")

    def __repr__(self) -> str:
        sq, sk = self._shape
        return f"AttnMask({sq} x {sk}, area {self._area}, {len(self._bands)} bands)"

    # --- sets --------------------------------------------------------------------------------------------

    def _combine(self, other: object, op: str) -> AttnMask:
        if not isinstance(other, AttnMask):
            return NotImplemented  # type: ignore[no-any-return]
        if self._shape != other._shape:
            raise ValueError(f"masks must have the same shape to combine, got {self._shape} and {other._shape}")
        bands = _planner.combine(self._bands, other._bands, op)
        return AttnMask.from_canonical_bands(bands, *self._shape)

    def __or__(self, other: object) -> AttnMask:
        return self._combine(other, "or")

    def __and__(self, other: object) -> AttnMask:
        return self._combine(other, "and")

    def __sub__(self, other: object) -> AttnMask:
        return self._combine(other, "sub")

    def __invert__(self) -> AttnMask:
        """The pairs that are hidden."""
        sq, sk = self._shape
        everything = np.array([[0, sq, 0, sk, -INF, INF, 1]], np.int64)
        return AttnMask.from_canonical_bands(_planner.combine(everything, self._bands, "sub"), sq, sk)

    @property
    def T(self) -> AttnMask:
        """The mask with queries and keys exchanged."""
        sq, sk = self._shape
        return AttnMask.from_canonical_bands(_planner.transpose(self._bands), sk, sq)

    def clip(self, q_range: tuple[int, int], k_range: tuple[int, int]) -> AttnMask:
        """Return the part of the mask in a rectangle, with the rectangle's shape and coordinates.

        Args:
            q_range, k_range: half-open ranges inside the mask.

        Raises:
            ValueError: for a range outside the mask.
        """
        sides = (("q_range", q_range, self._shape[0]), ("k_range", k_range, self._shape[1]))
        for name, given, _ in sides:
            if len(given) != 2:
                raise ValueError(f"{name} must be two numbers, got {given!r}")
        (q0, q1), (k0, k1) = (range_array(name, [given], n)[0].tolist() for name, given, n in sides)
        bands = _planner.shift(_planner.clip(self._bands, q0, q1, k0, k1), -q0, -k0)
        return AttnMask.from_bands(bands, q1 - q0, k1 - k0)

    # --- other forms -------------------------------------------------------------------------------------

    def row_intervals(self, q0: int = 0, q1: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return what rows [q0, q1) see: offsets int64 [rows + 1] and sorted intervals of keys int64 [n, 2].

        Raises:
            ValueError: for rows outside the mask.
        """
        rows = [[q0, self._shape[0] if q1 is None else q1]]
        ((first, last),) = range_array("q0 and q1", rows, self._shape[0]).tolist()
        offsets, intervals = _planner.row_intervals(self._bands, first, last)
        return offsets, intervals

    def to_dense(self) -> torch.Tensor:
        """Return the mask as a boolean matrix [sq, sk]. For tests and small masks: it is sq * sk bytes."""
        sq, sk = self._shape
        offsets, intervals = self.row_intervals()
        rows = np.repeat(np.arange(sq), np.diff(offsets))
        steps = np.zeros((sq, sk + 1), np.int8)
        np.add.at(steps, (rows, intervals[:, 0]), 1)
        np.add.at(steps, (rows, intervals[:, 1]), -1)
        return torch.from_numpy(np.cumsum(steps, 1, dtype=np.int8)[:, :sk] > 0)

    def to_slices(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return disjoint attention slices with exactly these pairs.

        Returns:
            q_ranges int64 [n, 2], k_ranges int64 [n, 2], mask_types int64 [n].
        """
        q, k, types = [], [], []
        for q0, q1, lo, hi, kind in _slices(self._bands):
            q.append((q0, q1))
            k.append((lo, hi))
            types.append(int(kind))
        return (
            np.array(q, np.int64).reshape(-1, 2),
            np.array(k, np.int64).reshape(-1, 2),
            np.array(types, np.int64),
        )

    def to_mask_mod(self, device: torch.device | str = "cpu") -> MaskMod:
        """Return the mask as a FlexAttention `mask_mod(b, h, q_idx, kv_idx)` for `device`; see masks.mask_mod."""
        from torch_magi.masks.mask_mod import to_mask_mod

        return to_mask_mod(self, device)

    def to_block_mask(self, BLOCK_SIZE: int | tuple[int, int] = 128, device: torch.device | str = "cpu") -> Any:
        """Return the mask as a FlexAttention `BlockMask`; see masks.block_mask."""
        from torch_magi.masks.block_mask import to_block_mask

        return to_block_mask(self, BLOCK_SIZE, device)

    def to_string(self, max_size: int = 64) -> str:
        """Return a picture: '#' visible, '.' hidden; in a reduced picture '+' stands for a part of a cell."""
        from torch_magi.masks.picture import to_string

        return to_string(self, max_size)

    def explain(self) -> str:
        """Return the mask in words, one line per band."""
        from torch_magi.masks.picture import explain

        return explain(self)

    def plot(self, path: str | None = None) -> Any:
        """Draw the mask with matplotlib.

        Args:
            path: where to write the picture; None returns the matplotlib figure.

        Raises:
            ImportError: if matplotlib is missing.
        """
        from torch_magi.viz.mask_picture import plot_coverage

        return plot_coverage(coverage(self), self._shape, repr(self), path)


def coverage(mask: AttnMask, max_size: int = 512) -> np.ndarray:
    """Return the visible share of the cells of a grid of at most max_size x max_size cells, float64."""
    sq, sk = mask.shape
    q_edges, k_edges = (_edges(n, max_size) for n in (sq, sk))
    out = np.zeros((len(q_edges) - 1, len(k_edges) - 1))
    for j in range(out.shape[1]):
        k0, k1 = int(k_edges[j]), int(k_edges[j + 1])
        column = _planner.clip(mask.bands, 0, sq, k0, k1)
        out[:, j] = _planner.row_areas(column, q_edges) / np.maximum(np.diff(q_edges) * (k1 - k0), 1)
    return out


def _edges(n: int, max_size: int) -> np.ndarray:
    cells = min(n, max_size)
    return np.array([n * i // cells for i in range(cells + 1)] if cells else [0], np.int64)


def _slices(bands: Bands) -> list[tuple[int, int, int, int, MaskType]]:
    """Return (q0, q1, k0, k1, type) of slices that are exactly the bands."""
    out: list[tuple[int, int, int, int, MaskType]] = []
    for q0, q1, k0, k1, dlo, dhi, step in bands.tolist():
        if step > 1:
            for a in range(q0, q1, step):
                out.append((a, min(a + step, q1), max(k0, a + dlo), min(k1, a + dhi), MaskType.FULL))
            continue
        # Cut where the lower end begins to move and where the upper end comes to rest: in between each end
        # either rests or moves, which is what the four types are.
        moves = min(max(k0 - dlo, q0), q1)
        rests = min(max(k1 - dhi + 1, q0), q1)
        edges = sorted({q0, moves, rests, q1})
        for a, b in pairwise(edges):
            lo_moves, hi_moves = a >= moves, b <= rests and dhi < INF
            lo = max(k0, a + dlo) if lo_moves else k0
            hi = min(k1, b - 1 + dhi)
            kind = MaskType(int(hi_moves) + 2 * int(lo_moves))
            out.append((a, b, lo, hi, kind))
    return out
