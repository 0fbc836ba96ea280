"""Fresh random numbers with a printed seed, and memory that is full of NaN until something writes to it."""

from __future__ import annotations

import contextlib
import random
import resource
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=0, help="seed of all tests")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "unpoisoned: leave new memory, and torch's determinism, as they are")


def pytest_report_header(config: pytest.Config) -> str:
    return f"torch {torch.__version__}, --seed {config.getoption('--seed')}"


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Another number for every test; --seed gives all of them others."""
    made = zlib.crc32(f"{request.config.getoption('--seed')} {request.node.nodeid}".encode()) % 1_000_000
    print(f"seed {made}: --seed {request.config.getoption('--seed')}")
    return made


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    base = request.config.getoption("--seed")
    torch.manual_seed(base)
    random.seed(base)
    np.random.seed(base)


@pytest.fixture(autouse=True)
def _poisoned(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fill memory that torch hands out uninitialised, to Python and to C++, with NaN.

    torch does so only with deterministic algorithms, so tests run with these (the CPU kernels always do).
    """
    if request.node.get_closest_marker("unpoisoned"):
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    before_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=before_warns)


@pytest.fixture
def address_space_limit() -> Callable[[int], contextlib.AbstractContextManager[None]]:
    """Return a context in which every allocation fails that takes the process some bytes above what it uses now."""
    usage = Path("/proc/self/statm")
    if not usage.exists():
        pytest.skip("needs Linux")

    @contextlib.contextmanager
    def limit(extra_bytes: int) -> Iterator[None]:
        pages = int(usage.read_text().split()[0])
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + extra_bytes, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)

    return limit
