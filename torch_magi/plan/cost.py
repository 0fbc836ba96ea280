"""How long a rank's part takes, and from that the number of stages: a model, with the device's figures as data.

    forward, N stages       local | stage 1 | stage 2 | ...       computed one after the other
                            exchange 1 | exchange 2 | ...         arriving one after the other, beside that

A stage begins when the one before is done and its keys are there. The backward takes 2.5 times the work, exchanges the
keys again, and returns float32 gradients of a stage while the next is computed; those of the last are waited for.
An exchange in two steps, between nodes and within them, takes both steps one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class CostModel:
    """Figures of a device and its links.

    The defaults are for an H200 whose ranks share NVLink: the attention rate was measured on one; bandwidth and
    latencies are assumptions until ranks have been timed. Give your own where the links are slower.

    Attributes:
        flops: floating point operations per second of the forward pass, of visible pairs.
        bandwidth: bytes per second that a rank receives in an exchange; within a node, where there are several.
        bandwidth_between_nodes: bytes per second that a rank receives from other nodes, with `ranks_per_node`.
        exchange_latency: seconds from the start of a step of an exchange of nothing until it has arrived.
        call: seconds that an attention call takes beyond its floating point operations.

    Raises:
        ValueError: for a rate that is not positive, or a negative time.
    """

    flops: float = 550e12
    bandwidth: float = 300e9
    exchange_latency: float = 30e-6
    call: float = 15e-6
    bandwidth_between_nodes: float = 45e9

    def __post_init__(self) -> None:
        for name in ("flops", "bandwidth", "bandwidth_between_nodes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("exchange_latency", "call"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")


class RankWork(NamedTuple):
    """What one rank does in a forward pass.

    local_flops, remote_flops: floating point operations over its own keys, and over those of others.
    bytes: of the keys and values that it receives from others; in an exchange in two steps, in the second.
    bytes_between_nodes: of those that it receives in the first step, for its node; None: there is one step.
    """

    local_flops: float
    remote_flops: float
    bytes: float
    bytes_between_nodes: float | None = None


BACKWARD_FLOPS = 2.5  # of the forward's
GRADIENT_BYTES = 2.0  # float32 beside 16-bit keys
LARGEST_AUTOMATIC_DEGREE = 8


def seconds_of(work: RankWork, overlap_degree: int, cost: CostModel) -> float:
    """Return how long forward and backward of a rank take with so many stages."""
    stages = max(overlap_degree, 1)
    latency, transfer = cost.exchange_latency, work.bytes / stages / cost.bandwidth
    if work.bytes_between_nodes is not None:
        latency *= 2
        transfer += work.bytes_between_nodes / stages / cost.bandwidth_between_nodes
    arrival, returned = latency + transfer, latency + GRADIENT_BYTES * transfer

    def calls(factor: float) -> tuple[float, float]:
        local = cost.call + factor * work.local_flops / cost.flops
        remote = cost.call + factor * work.remote_flops / stages / cost.flops
        return (0.0, local + remote - cost.call) if overlap_degree == 0 else (local, remote)

    local, remote = calls(1.0)
    done = local
    for stage in range(1, stages + 1):
        done = max(done, stage * arrival) + remote
    total = done
    local, remote = calls(BACKWARD_FLOPS)
    done, link = local, stages * arrival  # the link first brings the keys of all stages
    for stage in range(1, stages + 1):
        done = max(done, stage * arrival) + remote
        link = max(link, done) + returned
    return total + link


def choose_overlap_degree(works: list[RankWork], cost: CostModel) -> int:
    """Return the number of stages with which the slowest rank is done first; the smallest of equals.

    Args:
        works: of every rank, so that all choose alike.
        cost: figures of the device.
    """
    return min(
        range(LARGEST_AUTOMATIC_DEGREE + 1),
        key=lambda degree: max(seconds_of(work, degree, cost) for work in works),
    )
