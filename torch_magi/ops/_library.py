"""The one torch.library.Library of this package, and the tags of its operators.

Schemas, fakes and autograd are Python; the compiled library adds kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_magi import _extension

lib = torch.library.Library("torch_magi", "DEF")

TAGS = (torch.Tag.pt2_compliant_tag,)
# Inductor's CUDA graphs would replay an old plan: they do not look at opaque arguments.
PLAN_TAGS = (*TAGS, torch.Tag.cudagraph_unsafe)


def define(schema: str, fake: Callable[..., Any], tags: tuple[torch.Tag, ...] = TAGS) -> Any:
    """Define an operator whose kernels are compiled, and return its overload.

    Where the compiled library is missing, calling the operator raises NotImplementedError.
    """
    name = schema.split("(")[0]
    lib.define(schema, tags=tags)
    torch.library.register_fake(f"torch_magi::{name}", fake, lib=lib)
    problem = _extension.explain_missing()
    if problem is not None:

        def missing(*args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError(f"torch_magi::{name} has no kernel: {problem}")

        lib.impl(name, missing, "CPU")
    return getattr(torch.ops.torch_magi, name).default
