"""What torch offers only privately. Tested with torch 2.11.0 and 2.13.0.

Inductor's part is in comm/lowerings.py, which is imported only where something is compiled.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

try:
    from torch._library.opaque_object import MemberType, get_opaque_type_name, register_opaque_type
    from torch._opaque_base import OpaqueBase
except ImportError as error:
    raise ImportError(
        f"torch_magi passes plans to operators as opaque objects, which torch {torch.__version__} does not offer "
        "where they are expected; install torch 2.11 to 2.13"
    ) from error

__all__ = ["OpaqueBase", "is_exporting", "register_reference_type", "untraced"]

Function = TypeVar("Function", bound=Callable[..., Any])


def is_exporting() -> bool:
    """Return whether torch.export is tracing. In torch 2.11 `torch.compiler.is_exporting()` also holds in compile."""
    return bool(torch.compiler._is_exporting_flag)


def register_reference_type(cls: type, constants: tuple[str, ...]) -> str:
    """Register `cls` as an opaque reference type and return its name in operator schemas.

    Args:
        cls: a class whose instances are passed to operators; new contents never recompile.
        constants: attributes that traced code may read. Another value of one of them recompiles.
    """

    def guard(obj: Any) -> list[Any]:
        return [getattr(obj, name) for name in constants]

    register_opaque_type(
        cls, typ="reference", guard_fn=guard, members={name: MemberType.USE_REAL for name in constants}
    )
    return get_opaque_type_name(cls)


def untraced(fn: Function) -> Function:
    """Let torch.compile break its graph at `fn` and run it as it is: `torch.compiler.disable`, imported when needed.

    For what makes masks and plans: Dynamo would put torch in the place of NumPy, which fails on flags and views.
    """

    disabled: Any = None

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if disabled is None:
            if "torch._dynamo" not in sys.modules:  # takes a second to import, and without it nothing is traced
                return fn(*args, **kwargs)
            disabled = torch.compiler.disable(fn)
        return disabled(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    call._torchdynamo_disable_msg = "make masks and plans outside and pass the plan in"  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]
