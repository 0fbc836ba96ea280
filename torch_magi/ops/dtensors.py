"""DTensors among the arguments, found without importing them: that import takes a second, and few programs have any."""

from __future__ import annotations

import sys
from typing import Any


def note_dtensors(*tensors: Any) -> bool:
    """Return whether one of the arguments is a DTensor. From the first one on, the operators have sharding rules."""
    module = sys.modules.get("torch.distributed.tensor")  # whoever has a DTensor has imported it
    if module is None or not any(isinstance(x, module.DTensor) for x in tensors):
        return False
    import torch_magi.ops.sharding  # noqa: F401  # registers them

    return True
