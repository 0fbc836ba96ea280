"""What the tests on a GPU share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch


@pytest.fixture
def fastest() -> Callable[[Callable[[], object]], float]:
    """Return a function that runs another some times and returns the milliseconds of the fastest run."""

    def measure(run: Callable[[], object]) -> float:
        times = []
        for _ in range(12):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return min(times)

    return measure
