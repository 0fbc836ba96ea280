"""How a plan is made: the choices that are not the mask's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from torch_magi.masks.ranges import check_positive
from torch_magi.plan.cost import CostModel

Transport = Literal["all_to_all", "symmetric_memory"]
Dispatcher = Literal["sequential", "head_tail", "min_heap"]


@dataclass(frozen=True)
class PlanConfig:
    """Choices of `make_attn_plan`.

    Attributes:
        chunk_size: tokens in a chunk, the unit that is dispatched to ranks; the last chunk of the sequence may
            be shorter. None: chosen from the length and the number of ranks.
        dispatcher: which rank takes which chunk. "sequential": neighbours stay together. "head_tail": one
            stretch from the head and its mirror image from the tail, which balances one causal document.
            "min_heap": the largest chunk first, each to the rank with the least area; balances any mask.
        overlap_degree: the number of stages in which the keys of other ranks arrive, each while the one before
            is computed. 0: one exchange, then one attention call over all keys. "auto": the number with which
            `cost` expects the slowest rank to be done first; a plan with another number of stages recompiles.
        uneven: let "min_heap" give ranks different numbers of chunks where that balances the area better.
        ranks_per_node: ranks that share a fast network, for exchanges in two steps: between nodes each row travels
            once to every node that needs it, and then on to the ranks of the node. Ranks are numbered node by node;
            functions then take a DeviceMesh of shape (nodes, ranks_per_node). None: one step.
        transport: how rows travel. "all_to_all": by the collective of the process group. "symmetric_memory": GPUs of
            one node copy rows out of each other's memory, which packs nothing and holds no multiprocessor; it needs
            torch's symmetric memory between all ranks.
        cost: figures of the device and its links, for overlap_degree="auto".

    Raises:
        TypeError, ValueError: for a value outside these ranges.
    """

    chunk_size: int | None = None
    dispatcher: Dispatcher = "min_heap"
    overlap_degree: int | Literal["auto"] = 1
    uneven: bool = False
    ranks_per_node: int | None = None
    transport: Transport = "all_to_all"
    cost: CostModel = field(default_factory=CostModel)

    def __post_init__(self) -> None:
        if self.dispatcher not in get_args(Dispatcher):
            raise ValueError(f"dispatcher must be one of {list(get_args(Dispatcher))}, got {self.dispatcher!r}")
        for name in ("chunk_size", "ranks_per_node"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        if self.transport not in get_args(Transport):
            raise ValueError(f"transport must be one of {list(get_args(Transport))}, got {self.transport!r}")
        if self.transport == "symmetric_memory" and self.ranks_per_node is not None:
            raise ValueError(
                f"transport='symmetric_memory' is for one node, without ranks_per_node, got {self.ranks_per_node}"
            )
        degree = self.overlap_degree
        if degree != "auto" and (not isinstance(degree, int) or isinstance(degree, bool) or degree < 0):
            raise ValueError(f"overlap_degree must be 0 or more, or 'auto', got {degree!r}")
        if not isinstance(self.cost, CostModel):
            raise TypeError(f"cost must be a CostModel, got {type(self.cost).__name__}")
        if self.uneven and self.dispatcher != "min_heap":
            raise ValueError(f"uneven=True needs dispatcher='min_heap', got {self.dispatcher!r}")
