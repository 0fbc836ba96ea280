"""Everything that torch offers only privately, imported in one place.

Tested with torch 2.11.0 and 2.13.0. Where an opaque type cannot be registered, eager code works and
`torch.compile` of a function that takes a plan raises `PLAN_COMPILE_ERROR`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

TESTED_TORCH = "2.11 to 2.13"
PLAN_COMPILE_ERROR = (
    f"plans cannot be traced by torch {torch.__version__} (tested: {TESTED_TORCH}); "
    "call torch_magi outside torch.compile, or install a tested torch"
)

__all__ = ["HAS_OPAQUE_TYPES", "PLAN_COMPILE_ERROR", "OpaqueBase", "is_exporting", "register_reference_type"]

try:
    from torch._library.opaque_object import MemberType, get_opaque_type_name, register_opaque_type
    from torch._opaque_base import OpaqueBase

    HAS_OPAQUE_TYPES = True
except ImportError:  # a torch outside the tested range
    HAS_OPAQUE_TYPES = False

    class OpaqueBase:  # type: ignore[no-redef]
        """Stands in for torch's class of the same name."""


def is_exporting() -> bool:
    """Return whether torch.export is tracing. In torch 2.11 `torch.compiler.is_exporting()` also holds in compile."""
    return bool(torch.compiler._is_exporting_flag)


def register_reference_type(cls: type, constants: tuple[str, ...] = ()) -> str:
    """Register `cls` as an opaque reference type and return its name in operator schemas.

    Args:
        cls: a class whose instances are passed to operators; new contents never recompile.
        constants: attributes that traced code may read. Another value of one of them recompiles.

    Raises:
        NotImplementedError: if this torch has no opaque types.
    """
    if not HAS_OPAQUE_TYPES:
        raise NotImplementedError(PLAN_COMPILE_ERROR)
    guard: Callable[[Any], list[Any]] | None = None
    if constants:

        def guard(obj: Any) -> list[Any]:
            return [getattr(obj, name) for name in constants]

    members = {name: MemberType.USE_REAL for name in constants}
    register_opaque_type(cls, typ="reference", guard_fn=guard, members=members or None)
    return get_opaque_type_name(cls)
