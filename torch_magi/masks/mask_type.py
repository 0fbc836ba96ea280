"""The four types of an attention slice: which (row, column) pairs of a rectangle are visible.

A slice is ``(q_range, k_range, mask_type)``. With ``sq`` rows and ``sk`` columns, and local
indices ``i`` and ``j``::

    sq = 3, sk = 5     FULL        CAUSAL      INV_CAUSAL  BI_CAUSAL
                       # # # # #   # # # . .   # # # # #   # # # . .
                       # # # # #   # # # # .   . # # # #   . # # # .
                       # # # # #   # # # # #   . . # # #   . . # # #

CAUSAL is aligned at the bottom right, INV_CAUSAL at the top left. With ``sq > sk`` a CAUSAL
slice has ``sq - sk`` empty rows at its top, and a BI_CAUSAL slice is empty.
"""

from __future__ import annotations

import enum


class MaskType(enum.IntEnum):
    """The type of an attention slice; bit 0 bounds columns above, bit 1 below."""

    FULL = 0
    CAUSAL = 1
    INV_CAUSAL = 2
    BI_CAUSAL = 3

    @classmethod
    def parse(cls, value: MaskType | int | str) -> MaskType:
        """Return the type named by ``value``.

        Args:
            value: a MaskType, its integer, or its name in any case ("causal").

        Raises:
            ValueError: if no type has this integer or name.
            TypeError: if ``value`` is neither an integer nor a string.
        """
        accepted = ", ".join(f"{t.name} ({t.value})" for t in cls)
        if isinstance(value, str):
            if value.upper() not in cls.__members__:
                raise ValueError(f"mask type must be one of {accepted}, got {value!r}")
            return cls[value.upper()]
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"mask type must be a name or an integer, got {value!r}; one of {accepted}")
        if int(value) not in cls._value2member_map_:
            raise ValueError(f"mask type must be one of {accepted}, got {int(value)}")
        return cls(int(value))

    def diagonals(self, sq: int, sk: int) -> tuple[int | None, int | None]:
        """Return ``(lo, hi)``: the slice sees local ``(i, j)`` if ``lo <= j - i < hi``.

        None means unbounded on that side.
        """
        hi = sk - sq + 1 if self & MaskType.CAUSAL else None
        lo = 0 if self & MaskType.INV_CAUSAL else None
        return lo, hi

    def visible(self, i: int, j: int, sq: int, sk: int) -> bool:
        """Return whether row ``i`` of an ``sq`` x ``sk`` slice sees column ``j``."""
        lo, hi = self.diagonals(sq, sk)
        return (lo is None or j - i >= lo) and (hi is None or j - i < hi)

    def area(self, sq: int, sk: int) -> int:
        """Return how many pairs of an ``sq`` x ``sk`` slice are visible."""
        if self is MaskType.FULL:
            return sq * sk
        d = sk - sq
        if self is MaskType.BI_CAUSAL:
            return sq * (d + 1) if d >= 0 else 0
        rows = min(sq, sk)
        longest = sk
        return rows * longest - rows * (rows - 1) // 2
