"""Numbers of each row and head, such as its lse, as further columns of the rows that travel."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def _parts(dtype: torch.dtype) -> int:
    """Return the columns of a number: 3 x 8 bits of bfloat16 hold all 24 of a float32."""
    return 3 if dtype == torch.bfloat16 else 1


def attach(x: Tensor, numbers: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Return rows [rows, heads, head_dim] of `dtype` with numbers [rows, heads] behind each head."""
    columns = [x.to(dtype)]
    for number in numbers:
        part = number.to(dtype)
        columns.append(part[..., None])
        rest = number
        for _ in range(_parts(dtype) - 1):
            rest = torch.where(torch.isinf(rest), 0.0, rest - part.to(number.dtype))
            part = rest.to(dtype)
            columns.append(part[..., None])
    return torch.cat(columns, -1)


def detach(rows: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return the rows and their `count` numbers, in `dtype`, that `attach` joined."""
    parts = _parts(rows.dtype)
    x, *numbers = rows.split([rows.shape[-1] - count * parts, *[parts] * count], -1)
    return x.to(dtype), *(number.to(dtype).sum(-1) for number in numbers)
