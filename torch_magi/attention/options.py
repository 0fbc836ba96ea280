"""What a caller may ask of the attention functions beside out, and of the kernels."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypedDict

import torch

BACKENDS = ("auto", "cpu", "sm90", "triton")


class KernelOptions(TypedDict, total=False):
    """Options of the kernels; an unknown key is an error.

    backend: "auto" takes the fastest kernels for the tensors; "cpu", "sm90" and "triton" insist on those for the CPU,
        for GPUs of compute capability 9.0, and in Triton.
    sm_margin: multiprocessors that GPU kernels leave free, for communication beside them; 0 by default. Those in
        Triton leave none.
    """

    backend: Literal["auto", "cpu", "sm90", "triton"]
    sm_margin: int


class AuxRequest(NamedTuple):
    """Which results to return beside out.

    lse: the logsumexp of every row's logits (differentiable).
    max_logits: the largest scaled logit of every head (for QK-Clip; not differentiable).
    """

    lse: bool = False
    max_logits: bool = False


class AuxOutput(NamedTuple):
    """The results that an AuxRequest asked for; None where not asked.

    lse: [rows, num_heads_q] or [B, S, num_heads_q], float32 (float64 for float64 inputs), natural logarithm.
    max_logits: [num_heads_q], float32; -inf for a head that sees nothing.
    """

    lse: torch.Tensor | None = None
    max_logits: torch.Tensor | None = None


def parse_kernel_options(options: KernelOptions | None) -> tuple[str, int]:
    """Return (backend, sm_margin).

    Raises:
        TypeError: for an unknown key or a wrong type.
        ValueError: for a value outside its range.
    """
    given: dict[str, Any] = dict(options or {})
    accepted = sorted(KernelOptions.__annotations__)
    for key in given:
        if key not in accepted:
            raise TypeError(f"kernel_options must have keys among {accepted}, got {key!r}")
    backend, sm_margin = given.get("backend", "auto"), given.get("sm_margin", 0)
    if backend not in BACKENDS:
        raise ValueError(f"kernel_options['backend'] must be one of {list(BACKENDS)}, got {backend!r}")
    if isinstance(sm_margin, bool) or not isinstance(sm_margin, int):
        raise TypeError(f"kernel_options['sm_margin'] must be an int, got {sm_margin!r}")
    if sm_margin < 0:
        raise ValueError(f"kernel_options['sm_margin'] must be 0 or more, got {sm_margin}")
    return backend, sm_margin
