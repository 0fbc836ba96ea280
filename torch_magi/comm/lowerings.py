"""Inductor lowerings of the start operators: collective nodes that its overlap passes may move.

Registered when an operator is first traced, so that importing torch_magi does not import Inductor.
"""

from __future__ import annotations

from typing import Any

START_OPS: list[Any] = []  # operator packets, filled by comm.exchange

_registered = False


def register() -> None:
    """Teach Inductor the start operators. Does nothing the second time."""
    global _registered
    if _registered:
        return
    _registered = True
    from torch._inductor import comm_analysis, ir, scheduler
    from torch._inductor.lowering import fallbacks, register_lowering

    def lower(packet: Any) -> None:
        def lowering(x: Any, *rest: Any) -> Any:
            # Until the wait, Inductor keeps only the first input's memory: no other tensor may be read.
            x = ir.ExternKernel.require_contiguous(x)
            kernel: Any = ir._CollectiveKernel.create_out_of_place(packet.default, x, *rest)
            return ir.TensorBox.create(kernel)

        register_lowering(packet)(lowering)
        fallbacks.add(packet.default)  # or the FX overlap pass takes the start for a fusible pointwise op

    for packet in START_OPS:
        lower(packet)

    # The cost model reads the layout of every input, which an opaque plan has not. The answer must not
    # depend on the rank: ranks that decide differently issue their collectives in different orders.
    estimate: Any = comm_analysis.estimate_nccl_collective_runtime
    ours = {packet.default for packet in START_OPS}

    def estimate_with_plans(node: Any) -> Any:
        return 1.0 if getattr(node, "op_overload", None) in ours else estimate(node)

    vars(scheduler)["estimate_nccl_collective_runtime"] = estimate_with_plans
