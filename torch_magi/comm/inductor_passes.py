"""compile_options: which of Inductor's passes overlap exchanges with computation."""

from __future__ import annotations


def compile_options() -> dict[str, bool | list[str]]:
    """Return the options for `torch.compile` with which Inductor overlaps exchanges with computation.

    Two passes of its scheduler, in this order:

    raise_comms   runs what an exchange needs, and starts it, before everything that no exchange needs: in the forward
                  before the queries are projected, in the backward before the gradients of weights.
    sink_waits    waits only when nothing else can run. What `raise_comms` has put off, such as the gradients of
                  weights, so runs while exchanges are on their way.

    The other way round, the gradients of all weights wait for the end of the backward, and their activations with them.
    Both passes look at dependencies alone, never at sizes or times: all ranks, also those with other splits, get one
    order of collectives. That is why others are left out:

    - `reorder_communication_preserving_peak_memory` and `sink_waits_iterative` may exchange collectives.
    - `aten_distributed_optimizations.enable_overlap_scheduling` decides by sizes, so that ranks with other splits may
      order their collectives differently, which deadlocks; and it gathers estimates from all ranks at each
      compilation (in torch 2.13 unless its estimates are analytical), which hangs where one rank alone recompiles.

    Without these options exchanges and attention keep the order of eager code.

    Returns:
        A new dictionary. Merge it with options of your own.

    Example:
        >>> sorted(compile_options())
        ['reorder_for_compute_comm_overlap', 'reorder_for_compute_comm_overlap_passes']
    """
    return {
        "reorder_for_compute_comm_overlap": True,
        "reorder_for_compute_comm_overlap_passes": ["raise_comms", "sink_waits"],
    }
