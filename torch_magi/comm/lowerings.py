"""What Inductor knows about our operators: collective nodes that its overlap passes may move, and their cost.

Registered when an operator is first traced, so that importing torch_magi does not import Inductor.
"""

from __future__ import annotations

import math
from typing import Any
from weakref import WeakKeyDictionary

import torch

from torch_magi.comm.groups import LEVELS

START_OPS: list[Any] = []  # operator packets, filled by comm.exchange
# What an exchange is taken to bring, in rows, where its time is estimated. How many it does bring is in the plan,
# which differs from rank to rank; the estimate must not.
ESTIMATED_ROWS = 8192
NVLINK, INFINIBAND = 300, 25  # GB/s, where Inductor's configuration names none

_registered = False
_started: WeakKeyDictionary[Any, list[str]] = WeakKeyDictionary()  # by Inductor graph: buffers not yet waited for


def register() -> None:
    """Teach Inductor the start and attention operators. Does nothing the second time."""
    global _registered
    if _registered:
        return
    _registered = True
    for packet in START_OPS:
        _lower_start(packet)
    for overload in (torch.ops.torch_magi.flex_attn_fwd.default, torch.ops.torch_magi.flex_attn_bwd.default):
        _lower_attention(overload)
    _estimate_starts()


def _keep_between(kernel: Any) -> None:
    """Keep an operation behind the starts, and before the waits, between which the program has it.

    It reads nothing that is on its way, and so Inductor may put a wait before it: by default it looks for the order
    with the least memory. A dependency on the buffers in flight is enough: a wait changes its buffer, for which it has
    to let everything finish that came before.
    """
    from torch._inductor.virtualized import V

    graph: Any = V.graph
    in_flight = [name for name in _started.get(graph, ()) if name not in graph.mutated_buffers]
    graph.additional_buffer_deps[kernel.get_operation_name()].update(in_flight)
    _started[graph] = in_flight


def _lower_start(packet: Any) -> None:
    from torch._inductor import ir
    from torch._inductor.lowering import fallbacks, register_lowering
    from torch._inductor.virtualized import V

    def lowering(x: Any, *rest: Any) -> Any:
        # Until the wait, Inductor keeps only the first input's memory: no other tensor may be read.
        x = ir.ExternKernel.require_contiguous(x)
        kernel: Any = ir._CollectiveKernel.create_out_of_place(packet.default, x, *rest)
        _keep_between(kernel)
        _started[V.graph].append(kernel.get_name())
        return ir.TensorBox.create(kernel)

    register_lowering(packet)(lowering)
    fallbacks.add(packet.default)  # or the FX overlap pass takes the start for a fusible pointwise op


def _lower_attention(overload: Any) -> None:
    from torch._inductor.lowering import lowerings, make_fallback, tag_to_layout_constraint
    from torch._library.utils import get_layout_constraint_tag

    # What Inductor does by itself with an operator that has no lowering.
    make_fallback(overload, tag_to_layout_constraint(get_layout_constraint_tag(overload, with_default=True)))
    fallback = lowerings[overload]

    def lowering(*arguments: Any) -> Any:
        outputs: Any = fallback(*arguments)
        _keep_between(outputs[0].data.data.inputs[0])
        return outputs

    lowerings[overload] = lowering


def _estimate_starts() -> None:
    """Give Inductor's cost model of collectives an answer for ours: it reads layouts, which an opaque plan has not.

    The answer must not depend on the rank: ranks that decide differently issue their collectives in different orders.
    """
    from torch._inductor import comm_analysis, config, scheduler

    estimate: Any = comm_analysis.estimate_nccl_collective_runtime
    ours = {packet.default for packet in START_OPS}

    def estimate_with_plans(node: Any) -> Any:
        if getattr(node, "op_overload", None) not in ours:
            return estimate(node)
        rows = node.inputs[0].layout
        row_bytes = math.prod(int(size) for size in rows.size[1:]) * rows.dtype.itemsize
        names = str(node.constant_args[-1])
        # A mesh of nodes has two names; else as torch counts the ranks of a node.
        if LEVELS not in names and comm_analysis.get_collective_group_size(node) <= 8:
            gigabytes_per_s = config.intra_node_bw or NVLINK
        else:
            gigabytes_per_s = config.inter_node_bw or INFINIBAND
        return ESTIMATED_ROWS * row_bytes / gigabytes_per_s / 1e6  # milliseconds

    vars(scheduler)["estimate_nccl_collective_runtime"] = estimate_with_plans
