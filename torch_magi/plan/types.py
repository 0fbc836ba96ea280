"""The values that plans are: immutable, printable, picklable, opaque to torch.compile.

AttnPlan                      one rank's part of the attention of one mask
  dispatch: DispatchPlan      who holds which rows
  stages: (StagePlan, ...)    stage 0 uses local keys, the others keys that arrive
    mask: AttnMask            in local coordinates: this rank's rows x the stage's keys
    comm: CommPlan or None    the exchange that brings the keys
"""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from torch_magi import _planner
from torch_magi._torch_internals import OpaqueBase
from torch_magi.masks import AttnMask
from torch_magi.masks.ranges import Integers, check_length, cumulative_lengths, range_array
from torch_magi.plan.config import PlanConfig
from torch_magi.plan.dispatch import DispatchPlan, IntArray

TileArrays = tuple[np.ndarray, np.ndarray, np.ndarray]
TileTensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class DeviceCache:
    """Tensors made once per key; dropped when pickled."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # making one item may need another
        self._items: dict[Any, Any] = {}

    def get(self, key: Any, make: Any) -> Any:
        """Return the item of `key`, calling `make()` for it the first time."""
        found = self._items.get(key)
        if found is None:
            with self._lock:
                found = self._items.get(key)
                if found is None:
                    found = self._items[key] = make()
        return found

    def __reduce__(self) -> tuple[type[DeviceCache], tuple[()]]:
        return (DeviceCache, ())


class Frozen(OpaqueBase):
    """A value whose attributes are set once, by `__init__`, which ends with `self._freeze()`."""

    _tensors: DeviceCache

    def _freeze(self) -> None:
        self.__dict__["_tensors"] = DeviceCache()

    def __setattr__(self, name: str, value: Any) -> None:
        if "_tensors" in self.__dict__:
            raise AttributeError(f"{type(self).__name__} cannot be changed: {name} was about to be set. Make a new one")
        super().__setattr__(name, value)


class Move(NamedTuple):
    """Rows [first, last) of a rank's tensor, which become the rows from `at` on here."""

    rank: int
    first: int
    last: int
    at: int


class Moves(NamedTuple):
    """What a rank takes out of the memory of others.

    Attributes:
        cast: out of their local rows.
        reduce: out of the rows that they return.
        workspace_rows: the most rows that any rank has to show; the same on all ranks.
    """

    cast: tuple[Move, ...]
    reduce: tuple[Move, ...]
    workspace_rows: int


class CommPlan(Frozen):
    """One rank's part of an exchange in which a row goes to every rank that needs it, and to no other.

    Attributes:
        send_ranges: int64 [n, 2]; half-open ranges of local rows, concatenated in the order in which they are
            sent; the rows for rank 0 come first. A row may be sent to several ranks.
        input_split_sizes: how many of these rows go to each rank.
        output_split_sizes: how many rows come from each rank.
        num_rows: rows of the local tensor.
        rank, size: the rank whose part this is, of how many.
        intra: None, or the second of two steps (plan/hierarchy.py). What is above is then the first step, in which
            a row goes to every node that needs it: "rank" reads "node" in the splits. `intra` takes what has arrived
            on to the ranks of the node.
        moves: None, or who reads which rows out of whose memory, where rows are not sent but fetched.
        copied_ranges: int64 [n, 2]; ranges of local rows, once for every rank that receives them in the end.
        num_sent: rows that are sent (in the first step).
        num_received: rows that arrive in the end.
    """

    def __init__(
        self,
        send_ranges: IntArray,
        input_split_sizes: tuple[int, ...],
        output_split_sizes: tuple[int, ...],
        num_rows: int,
        rank: int,
        intra: CommPlan | None = None,
        copied_ranges: IntArray | None = None,
        moves: Moves | None = None,
    ) -> None:
        self.send_ranges = np.ascontiguousarray(send_ranges, np.int64)
        self.send_ranges.setflags(write=False)
        self.input_split_sizes = input_split_sizes
        self.output_split_sizes = output_split_sizes
        self.num_rows = num_rows
        self.rank = rank
        self.intra = intra
        self.moves = moves
        self.copied_ranges = self.send_ranges if copied_ranges is None else copied_ranges
        self.size: int = len(output_split_sizes) * (1 if intra is None else intra.size)
        self.num_sent = sum(input_split_sizes)
        self.num_received: int = sum(output_split_sizes) if intra is None else intra.num_received
        self._freeze()

    def __reduce__(self) -> tuple[Any, ...]:
        splits = (self.input_split_sizes, self.output_split_sizes)
        second = (self.intra, None if self.intra is None else self.copied_ranges, self.moves)
        return (CommPlan, (self.send_ranges, *splits, self.num_rows, self.rank, *second))

    @property
    def rows_from_others(self) -> int:
        """Rows that arrive from other ranks, or, in the first of two steps, from other nodes."""
        mine = self.rank if self.intra is None else self.rank // self.intra.size
        return sum(self.output_split_sizes) - self.output_split_sizes[mine]

    def send_ranges_on(self, device: torch.device) -> torch.Tensor:
        """`send_ranges` as an int64 [n, 2] tensor on `device`, uploaded once."""
        made: torch.Tensor = self._tensors.get(device, lambda: torch.tensor(self.send_ranges, device=device))
        return made

    def send_rows_on(self, device: torch.device) -> torch.Tensor:
        """The rows in `send_ranges`, int64 [num_sent], on `device`, uploaded once."""
        made: torch.Tensor = self._tensors.get(("rows", device), lambda: rows_in(self.send_ranges).to(device))
        return made

    def num_copies_on(self, device: torch.device) -> torch.Tensor:
        """How many ranks receive each local row, int64 [num_rows], on `device`, uploaded once."""

        def make() -> torch.Tensor:
            return torch.bincount(rows_in(self.copied_ranges), minlength=self.num_rows).to(device)

        made: torch.Tensor = self._tensors.get(("copies", device), make)
        return made

    @classmethod
    def from_splits(
        cls,
        send_rows: list[list[tuple[int, int]]],
        output_split_sizes: list[int],
        num_rows: int,
        rank: int,
    ) -> CommPlan:
        """Make a plan from the ranges of rows to send.

        Args:
            send_rows: for every rank, the half-open ranges of local rows that go to it.
            output_split_sizes: how many rows come from each rank.
            num_rows: rows of the local tensor.
            rank: this rank.

        Raises:
            TypeError, ValueError: if the lists contradict each other, or hold no ranges of rows of the tensor.
        """
        size = len(output_split_sizes)
        if len(send_rows) != size:
            raise ValueError(
                f"send_rows and output_split_sizes must have one entry per rank, got {len(send_rows)} and {size}"
            )
        if not 0 <= rank < size:
            raise ValueError(f"rank must be in [0, {size}), got {rank}")
        num_rows = check_length("num_rows", num_rows)
        received = tuple(check_length(f"output_split_sizes[{r}]", n) for r, n in enumerate(output_split_sizes))
        ranges = [range_array(f"send_rows[{r}]", given, num_rows) for r, given in enumerate(send_rows)]
        sent = tuple(int((to[:, 1] - to[:, 0]).sum()) for to in ranges)
        if sent[rank] != received[rank]:
            raise ValueError(
                f"rank {rank} must receive from itself what it sends to itself, {sent[rank]} rows, got "
                f"output_split_sizes[{rank}] = {received[rank]}"
            )
        return cls(np.concatenate(ranges), sent, received, num_rows, rank)

    def __str__(self) -> str:
        nodes = "" if self.intra is None else f"; within its node: {self.intra}"
        return (
            f"CommPlan(rank {self.rank}, {self.num_rows} rows: sends {list(self.input_split_sizes)}, "
            f"receives {list(self.output_split_sizes)}{nodes})"
        )

    __repr__ = __str__


def rows_in(ranges: IntArray) -> torch.Tensor:
    """Return the rows in ranges [n, 2], one range behind the other, as an int64 tensor."""
    rows = [np.arange(a, b) for a, b in ranges]
    return torch.from_numpy(np.concatenate(rows) if rows else np.zeros(0, np.int64))


@dataclass(frozen=True, eq=False)
class StagePlan:
    """One attention call of a rank.

    Attributes:
        mask: what it computes: rows are the rank's query rows, columns the stage's keys.
        comm: the exchange that brings the keys; None where they are the rank's own.
    """

    mask: AttnMask
    comm: CommPlan | None

    @cached_property
    def _cache(self) -> DeviceCache:
        return DeviceCache()

    def cached(self, key: Any, make: Any) -> Any:
        """Return what `make()` returned the first time for `key`: what derives from the stage."""
        return self._cache.get(key, make)

    def tile_arrays(self, side: str, tile_rows: int, tile_cols: int, col_align: int = 1) -> TileArrays:
        """Return the tile plan of one side, built on first use and kept.

        Args:
            side: "q" for tiles of query rows over keys, "k" for tiles of keys over query rows.
            tile_rows, tile_cols: shape of a tile, in tokens.
            col_align: tiles start at columns that are multiples of it, a power of two that divides tile_cols.

        Returns:
            items int32 [n_items, 8], runs int32 [n_runs, 4], bands int32 [n_bands, 8].
        """

        def make() -> TileArrays:
            bands, rows = self.mask.bands, self.mask.shape[0]
            if side == "k":
                bands, rows = _planner.transpose(bands), self.mask.shape[1]
            return _planner.tile_plan(bands, rows, tile_rows, tile_cols, col_align)

        made: TileArrays = self.cached((side, tile_rows, tile_cols, col_align), make)
        return made

    def tiles(
        self,
        side: str,
        tile_rows: int,
        tile_cols: int,
        device: torch.device,
        col_align: int = 1,
    ) -> TileTensors:
        """Return `tile_arrays` as tensors on `device`, uploaded once."""

        def make() -> TileTensors:
            arrays = self.tile_arrays(side, tile_rows, tile_cols, col_align)
            items, runs, bands = (torch.from_numpy(a).to(device) for a in arrays)
            return items, runs, bands

        made: TileTensors = self.cached((side, tile_rows, tile_cols, device, col_align), make)
        return made

    def hidden(self, side: str, device: torch.device) -> torch.Tensor | None:
        """Return which keys ("k") no row sees, or which rows ("q") see no key.

        Returns:
            bool [keys] or [rows] on `device`; None if there are none.
        """

        def make() -> tuple[torch.Tensor | None]:
            mask = self.mask if side == "k" else self.mask.T
            rows, keys = mask.shape
            hidden = torch.ones(keys, dtype=torch.bool)
            for first, last in _planner.key_ranges(mask.bands, np.array([[0, rows]], np.int64)).tolist():
                hidden[first:last] = False
            return (hidden.to(device) if hidden.any() else None,)

        (made,) = self.cached(("hidden", side, device), make)
        found: torch.Tensor | None = made
        return found


class AttnPlan(Frozen):
    """Who computes what for one mask, seen by one rank. Make it with `make_attn_plan`.

    Attributes:
        mask: the global mask, of all rows and keys.
        num_heads_q, num_heads_kv, head_dim, head_dim_v, dtype: what the tensors must be.
        device: where `position_ids` lie.
        batch_size: B where the mask was given for one element of a batch; the plan then covers B of them.
        cp_size, cp_rank: number of ranks, and whose part this is.
        config: the choices it was made with.
        dispatch: who holds which rows.
        stages, num_stages: the attention calls of this rank.
        num_tokens_local: rows that this rank holds.
        area_per_rank: visible pairs that each rank computes.
        comm_rows_per_rank: key rows that each rank receives from others in one forward pass.
        comm_rows_between_nodes: key rows that travel from one node to another in one forward pass, of all ranks
            together; None where `config` says nothing of nodes.
        cu_seqlens: int64 [num_documents + 1]; where documents begin, for `roll` and `document_position_ids`. One
            document of everything, or one per element of a batch, unless set by `with_documents`.
    """

    def __init__(
        self,
        mask: AttnMask,
        heads: tuple[int, int],
        head_dims: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        batch_size: int | None,
        cp_rank: int,
        config: PlanConfig,
        dispatch: DispatchPlan,
        stages: tuple[StagePlan, ...],
        area_per_rank: tuple[int, ...],
        comm_rows_per_rank: tuple[int, ...],
        cu_seqlens: IntArray | None = None,
        comm_rows_between_nodes: int | None = None,
    ) -> None:
        self.mask = mask
        self.num_heads_q, self.num_heads_kv = heads
        self.head_dim, self.head_dim_v = head_dims
        self.dtype = dtype
        self.device = device
        self.batch_size = batch_size
        self.cp_size = dispatch.cp_size
        self.cp_rank = cp_rank
        self.config = config
        self.dispatch = dispatch
        self.stages = stages
        self.area_per_rank = area_per_rank
        self.comm_rows_per_rank = comm_rows_per_rank
        self.comm_rows_between_nodes = comm_rows_between_nodes
        self.num_stages = len(stages)
        self.num_tokens_local = dispatch.tokens_per_rank[cp_rank]
        elements = 1 if batch_size is None else batch_size
        length = dispatch.total_tokens // elements
        self.cu_seqlens = np.arange(elements + 1) * length if cu_seqlens is None else cu_seqlens
        self.cu_seqlens.setflags(write=False)
        self._freeze()

    @property
    def starts_local(self) -> bool:
        """Whether stage 0 needs no exchange."""
        return self.stages[0].comm is None

    @property
    def imbalance(self) -> float:
        """Largest area of a rank divided by the mean; 1.0 is perfect balance."""
        total = sum(self.area_per_rank)
        return max(self.area_per_rank) * self.cp_size / total if total else 1.0

    @property
    def comm_rows(self) -> int:
        """Key rows that all ranks together receive from others in one forward pass."""
        return sum(self.comm_rows_per_rank)

    @property
    def comm_bytes(self) -> int:
        """Bytes of these rows: keys and values of the kv heads."""
        return self.comm_rows * self.num_heads_kv * (self.head_dim + self.head_dim_v) * self.dtype.itemsize

    @property
    def position_ids(self) -> torch.Tensor:
        """int64 [num_tokens_local] on the plan's device: the global index of every local row."""
        rows: torch.Tensor = self.cached(
            "position_ids", lambda: torch.from_numpy(self.dispatch.rows(self.cp_rank)).to(self.device)
        )
        return rows.clone()

    @property
    def document_position_ids(self) -> torch.Tensor:
        """int64 [num_tokens_local] on the plan's device: every local row's index within its document.

        The documents are those of `cu_seqlens`. Rows behind the last one belong to none and have 0.
        """

        def make() -> torch.Tensor:
            rows = self.dispatch.rows(self.cp_rank)
            begin = self.cu_seqlens[np.searchsorted(self.cu_seqlens, rows, side="right") - 1]
            return torch.from_numpy(np.where(rows < self.cu_seqlens[-1], rows - begin, 0)).to(self.device)

        positions: torch.Tensor = self.cached("document_position_ids", make)
        return positions.clone()

    def cached(self, key: Any, make: Any) -> Any:
        """Return what `make()` returned the first time for `key`: what derives from the plan."""
        return self._tensors.get(key, make)

    def with_documents(self, cu_seqlens: Integers) -> AttnPlan:
        """Return this plan with other documents, for `roll` and `document_position_ids`. The mask stays as it is.

        Args:
            cu_seqlens: int [num_documents + 1]; where documents begin in the whole sequence, the elements of a
                batch one after the other. Rows behind the last value belong to no document.

        Raises:
            TypeError, ValueError: if they are no integers, do not begin with 0, fall, or pass the last token.
        """
        other = copy.copy(self)
        cu, _ = cumulative_lengths("cu_seqlens", cu_seqlens, self.dispatch.total_tokens)
        cu.setflags(write=False)
        other.__dict__["cu_seqlens"] = cu
        other._freeze()
        return other

    def with_mask(self, mask: AttnMask) -> AttnPlan:
        """Return a plan of another mask of the same shape for the same dispatched rows.

        For models whose layers see different masks: dispatch once, plan each mask.
        """
        from torch_magi.plan.planner import plan_on_dispatch

        return plan_on_dispatch(mask, self)

    def plot(self, path: str | None = None) -> Any:
        """Draw the mask coloured by the rank that computes it, and each rank's stages. Needs matplotlib.

        Args:
            path: where to write the picture; None returns the matplotlib figure.
        """
        from torch_magi.viz.plan_picture import plot_plan

        return plot_plan(self, path)

    def __str__(self) -> str:
        sq, sk = self.mask.shape
        lines = [
            f"AttnPlan of rank {self.cp_rank} of {self.cp_size}: mask {sq} x {sk}, area {self.mask.area}, "
            f"heads {self.num_heads_q}:{self.num_heads_kv}, head_dim {self.head_dim}:{self.head_dim_v}, "
            f"{str(self.dtype).removeprefix('torch.')}",
            f"  dispatch: {self.config.dispatcher}, chunk_size {self.dispatch.chunk_size}, "
            f"tokens per rank {_brief(self.dispatch.tokens_per_rank)}",
            f"  area per rank {_brief(self.area_per_rank)}, imbalance {self.imbalance:.3f}",
            f"  rows received per rank {_brief(self.comm_rows_per_rank)}, {self.comm_bytes} bytes in all",
        ]
        if self.comm_rows_between_nodes is not None:
            lines.append(
                f"  nodes of {self.config.ranks_per_node} ranks, {self.comm_rows_between_nodes} rows between nodes"
            )
        for i, stage in enumerate(self.stages):
            if stage.comm is None:
                keys = "local keys"
            elif stage.comm.intra is None:
                keys = f"keys from others: {stage.comm.rows_from_others}"
            else:
                step, intra = stage.comm.rows_from_others, stage.comm.intra.rows_from_others
                keys = f"rows from other nodes: {step}, then from ranks of the node: {intra}"
            lines.append(f"  stage {i}: {stage.mask.shape[0]} x {stage.mask.shape[1]}, area {stage.mask.area}, {keys}")
        return "\n".join(lines)

    __repr__ = __str__


def _brief(values: tuple[int, ...]) -> str:
    if len(values) <= 8:
        return str(list(values))
    return f"[{', '.join(map(str, values[:4]))}, ... {values[-1]}] (min {min(values)}, max {max(values)})"
