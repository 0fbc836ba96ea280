"""What is sent: the exchanges of context parallelism, as operators that a compiler can see and move."""

from torch_magi.comm.dispatch import dispatch, undispatch
from torch_magi.comm.group_cast import group_cast
from torch_magi.comm.group_reduce import group_reduce
from torch_magi.comm.inductor_passes import compile_options
from torch_magi.comm.loss import cp_mean_loss
from torch_magi.comm.roll import roll

__all__ = ["compile_options", "cp_mean_loss", "dispatch", "group_cast", "group_reduce", "roll", "undispatch"]
