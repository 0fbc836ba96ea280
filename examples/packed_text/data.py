"""Real text as packed sequences: files -> documents of bytes -> sequences of a fixed length.

Every batch is a pure function of (corpus, length, seed, step), so all ranks make the same one without
communication, and a resumed run goes on with the batches it would have seen.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

VOCABULARY = 256  # bytes
END = 0  # ends a document; text has no such byte
NO_TARGET = -100  # what cross_entropy ignores
SHORTEST_DOCUMENT = 16
LARGEST_FILE = 1 << 20
SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "node_modules"}


@dataclass(frozen=True)
class Batch:
    """One packed sequence.

    Attributes:
        tokens: int64 [length]; bytes, each document followed by END.
        targets: int64 [length]; the next byte of the same document, NO_TARGET behind its last one.
        positions: int64 [length]; index within the document.
        cu_seqlens: int64 [documents + 1]; where documents begin, and the length.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor
    cu_seqlens: np.ndarray

    @property
    def num_targets(self) -> int:
        """Tokens that have a target."""
        return len(self.tokens) - (len(self.cu_seqlens) - 1)


def read_corpus(folder: Path, max_bytes: int, without: tuple[Path, ...] = ()) -> list[np.ndarray]:
    """Return the text files below a folder as arrays of bytes, in the order of their paths.

    Skipped: hidden files and folders, installed packages, files over 1 MiB, and whatever is not UTF-8 text.

    Args:
        folder: where to look.
        max_bytes: stop when there is so much text.
        without: folders to leave out, such as the one that the results are written to.

    Raises:
        SystemExit: if the folder does not exist or holds no text.
    """
    if not folder.is_dir():
        raise SystemExit(f"--data must be a folder of text files, got {folder}")
    files, total = [], 0
    for path in _paths(folder, {path.resolve() for path in without}):
        try:
            if path.stat().st_size > LARGEST_FILE:
                continue
            content = path.read_bytes()
            content.decode()
        except (OSError, UnicodeDecodeError):
            continue
        if len(content) < SHORTEST_DOCUMENT or END in content:
            continue
        files.append(np.frombuffer(content, np.uint8))
        total += len(content)
        if total >= max_bytes:
            break
    if not files:
        raise SystemExit(f"--data must be a folder of text files, and {folder} holds none")
    return files


def _paths(folder: Path, without: set[Path]) -> list[Path]:
    found = []
    for parent, folders, names in os.walk(folder.resolve()):
        folders[:] = [
            f for f in folders
            if f not in SKIPPED_FOLDERS and not f.startswith(".") and Path(parent, f) not in without
        ]  # fmt: skip
        found += [Path(parent, name) for name in names if not name.startswith(".")]
    return sorted(found)


def make_batch(corpus: list[np.ndarray], length: int, seed: int, step: int) -> Batch:
    """Pack random pieces of random files, 16 to length / 4 bytes each, into one sequence."""
    rng = np.random.default_rng((seed, step))
    longest = max(length // 4, SHORTEST_DOCUMENT)
    parts: list[np.ndarray] = []
    ends = [0]
    while ends[-1] < length:
        text = corpus[rng.integers(len(corpus))]
        wanted = int(np.exp(rng.uniform(np.log(SHORTEST_DOCUMENT), np.log(longest))))
        wanted = min(wanted, length - ends[-1])
        start = int(rng.integers(max(len(text) - wanted, 0) + 1))
        piece = np.append(text[start : start + wanted - 1], np.uint8(END))
        parts.append(piece)
        ends.append(ends[-1] + len(piece))
    cu_seqlens = np.array(ends, np.int64)
    tokens = torch.from_numpy(np.concatenate(parts).astype(np.int64))
    positions = np.arange(length) - np.repeat(cu_seqlens[:-1], np.diff(cu_seqlens))
    targets = tokens.roll(-1)
    targets[torch.from_numpy(cu_seqlens[1:] - 1)] = NO_TARGET
    return Batch(tokens, targets, torch.from_numpy(positions), cu_seqlens)
