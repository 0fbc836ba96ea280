"""DTensors: sharding rules of the operators, dispatch and undispatch, and a style for parallelize_module.

Imported where `torch_magi.tensor` is first used: torch.distributed.tensor takes a second to import.
"""

from torch_magi.tensor.dispatch import dispatch, undispatch
from torch_magi.tensor.parallel_style import MagiContextParallel

__all__ = ["MagiContextParallel", "dispatch", "undispatch"]
