"""Which calls need autograd, and which kinds of differentiation are refused."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from torch_magi.ops._library import lib


def wants_grad(*tensors: torch.Tensor | None) -> bool:
    """Return whether a backward pass has to be recorded for a call with these tensors.

    Raises:
        NotImplementedError: if one of them carries a forward-mode tangent, which would be lost, or is
            differentiated by a transform of torch.func.
    """
    if forward_ad._current_level >= 0 and any(
        x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors
    ):
        raise NotImplementedError("torch_magi has no forward-mode derivatives (jvp); use backward")
    wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    if wanted and torch._C._functorch.peek_interpreter_stack() is not None:
        raise NotImplementedError("torch_magi has no torch.func.grad or vjp; use backward or torch.autograd.grad")
    return wanted


def refuse_second_derivative(*grads: torch.Tensor | None) -> None:
    """Raise NotImplementedError in a backward pass that is itself to be differentiated."""
    if wants_grad(*grads):
        raise NotImplementedError("torch_magi has no second derivatives; call backward with create_graph=False")


def refuse_vmap(name: str) -> None:
    """Make `torch.vmap` over an operator an error that says what to do."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"torch_magi::{name} cannot be vmapped; put the batch into the rows: [B, S, heads, head_dim] inputs, "
            "or a plan with batch_size"
        )

    torch.library.register_vmap(f"torch_magi::{name}", refuse, lib=lib)
