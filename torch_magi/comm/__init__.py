"""What is sent: the exchanges of context parallelism, as operators that a compiler can see and move."""

from torch_magi.comm.dispatch import dispatch, undispatch
from torch_magi.comm.group_cast import group_cast, group_reduce
from torch_magi.comm.inductor_passes import compile_options

__all__ = ["compile_options", "dispatch", "group_cast", "group_reduce", "undispatch"]
