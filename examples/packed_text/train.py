"""Training on one rank of several that share every sequence."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import torch_magi as magi
from packed_text import checkpoint
from packed_text.data import Batch, make_batch, read_corpus
from packed_text.model import Decoder, ModelConfig

WARMUP_STEPS = 10
LOG_EVERY = 10
MAX_CORPUS_BYTES = 32 << 20


@dataclass(frozen=True)
class Settings:
    """What to train on, and how. The command line (train_packed_text.py --help) explains each."""

    data: Path
    out: Path
    steps: int = 60
    length: int = 4096
    learning_rate: float = 1e-3  # 2e-3 is at the edge of stability, where differences in rounding grow
    seed: int = 0
    device: str = "cpu"
    dispatcher: str = "min_heap"
    overlap_degree: int = 2
    compile: bool = True
    checkpoint: Path | None = None
    save_every: int = 0
    resume: Path | None = None

    @property
    def attention_dtype(self) -> torch.dtype:
        """The dtype that attention is computed in: on a GPU autocast makes it bfloat16."""
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    def read_corpus(self) -> list[np.ndarray]:
        """Return the text to train on, without what a run has written."""
        written = [folder for folder in (self.out, self.checkpoint) if folder is not None]
        return read_corpus(self.data, MAX_CORPUS_BYTES, tuple(written))

    def to_arguments(self) -> list[str]:
        """Return the settings as arguments of train_packed_text.py."""
        arguments = [] if self.compile else ["--no-compile"]
        for name, value in vars(self).items():
            if name != "compile" and value is not None:
                arguments.append(f"--{name.replace('_', '-')}={value}")
        return arguments


@dataclass
class History:
    """What a run did. Per step, but for the last fields."""

    ranks: int
    losses: list[float] = field(default_factory=list)
    imbalance: list[float] = field(default_factory=list)
    bytes_sent: list[int] = field(default_factory=list)  # by all ranks: keys, values of one layer, forward
    bytes_all_gather: list[int] = field(default_factory=list)  # if every rank got all of them
    area_per_rank: list[int] = field(default_factory=list)  # summed over the steps
    tokens_per_second: float = 0.0
    compilations: int = 0

    @classmethod
    def read(cls, path: Path) -> History:
        """Return what `write` wrote."""
        return cls(**json.loads(path.read_text()))

    def write(self, path: Path) -> None:
        """Write the history as JSON."""
        path.write_text(json.dumps(asdict(self)))


def history_path(out: Path, ranks: int) -> Path:
    """Return where the history of a run with so many ranks lies."""
    return out / f"history_{ranks}_ranks.json"


def plan_of(batch: Batch, model: ModelConfig, settings: Settings, ranks: int, rank: int) -> magi.AttnPlan:
    """Return the plan of a batch for one rank. Pure: any process can plan for any rank."""
    return magi.make_attn_plan(
        magi.masks.document(batch.cu_seqlens, causal=True), model.heads_q, model.heads_kv, model.head_dim,
        dtype=settings.attention_dtype, device=settings.device, cp_size=ranks, cp_rank=rank,
        config=magi.PlanConfig(dispatcher=settings.dispatcher, overlap_degree=settings.overlap_degree),
    )  # fmt: skip


def bytes_in_splits(plan: magi.AttnPlan) -> int:
    """Return the bytes that this rank sends to others in one forward pass of one attention layer."""
    rows = 0
    for stage in plan.stages:
        if stage.comm is not None:
            rows += sum(stage.comm.input_split_sizes) - stage.comm.input_split_sizes[stage.comm.rank]
    return rows * kv_row_bytes(plan)


def kv_row_bytes(plan: magi.AttnPlan) -> int:
    """Return the bytes of one token's key and value."""
    return plan.num_heads_kv * (plan.head_dim + plan.head_dim_v) * plan.dtype.itemsize


class Trainer:
    """One rank's model and optimizer, and a history that is the same on all ranks."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.device = torch.device(settings.device)
        self.corpus = settings.read_corpus()
        self.model = Decoder(ModelConfig(), settings.seed).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings.learning_rate, eps=1e-6)
        self.forward = self.model
        if settings.compile:
            self.forward = torch.compile(self.model, fullgraph=True, options=magi.compile_options())
        self.history = History(self.ranks, area_per_rank=[0] * self.ranks)
        self.group = dist.group.WORLD.group_name if self.ranks > 1 else None

    def step(self, number: int) -> float:
        """Take one step and return the loss: the mean over all targets of the batch."""
        settings = self.settings
        batch = make_batch(self.corpus, settings.length, settings.seed, number)
        plan = plan_of(batch, self.model.config, settings, self.ranks, self.rank)
        rows = [magi.dispatch(x.to(self.device), plan) for x in (batch.tokens, batch.targets, batch.positions)]
        # The loss is a mean over the whole batch, so each rank divides by the number of targets of all ranks,
        # and the ranks' gradients add up.
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            loss = self.forward(*rows, plan, self.group) / batch.num_targets
        self.optimizer.zero_grad()
        loss.backward()
        total = self.sum_over_ranks(loss.detach())
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate * min(1.0, (number + 1) / WARMUP_STEPS)
        self.optimizer.step()
        self.record(plan, total)
        return total

    def sum_over_ranks(self, loss: Tensor) -> float:
        """Sum the gradients over ranks, in place, and return the summed loss. One exchange for all of it."""
        parameters = list(self.model.parameters())
        flat = torch.cat([loss.reshape(1), *(p.grad.flatten() for p in parameters)])
        if self.ranks > 1:
            dist.all_reduce(flat)
        parts = flat[1:].split([p.numel() for p in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad.copy_(part.view_as(parameter))
        return flat[0].item()

    def record(self, plan: magi.AttnPlan, loss: float) -> None:
        """Note a step, after counting what was sent."""
        sent = torch.tensor(bytes_in_splits(plan), device=self.device)
        if self.ranks > 1:
            dist.all_reduce(sent)
        assert sent.item() == plan.comm_bytes, f"sent {sent.item()} bytes, planned {plan.comm_bytes}"
        history = self.history
        history.losses.append(loss)
        history.imbalance.append(plan.imbalance)
        history.bytes_sent.append(int(sent.item()))
        history.bytes_all_gather.append((self.ranks - 1) * self.settings.length * kv_row_bytes(plan))
        history.area_per_rank = [a + b for a, b in zip(history.area_per_rank, plan.area_per_rank, strict=True)]


def progress_line(done: int, steps: int, loss: float, rate: float) -> str:
    """Return a progress bar with loss and speed."""
    filled = 30 * done // max(steps, 1)
    bar = "#" * filled + "." * (30 - filled)
    return f"[{bar}] step {done}/{steps}  loss {loss:.4f}  {rate:,.0f} tokens/s"


def train(settings: Settings) -> History:
    """Train as one rank of the default process group, and return what happened.

    Rank 0 shows progress and writes the history to `settings.out`.
    """
    trainer = Trainer(settings)
    first = checkpoint.load(settings.resume, trainer.model, trainer.optimizer) if settings.resume else 0
    last = first + settings.steps
    shows = trainer.rank == 0
    live = sys.stdout.isatty()
    rate, steady = 0.0, 0.0
    for number in range(first, last):
        begin = time.perf_counter()
        loss = trainer.step(number)
        seconds = time.perf_counter() - begin
        rate = settings.length / seconds
        if number >= first + 2:  # the first two steps compile
            steady += seconds
        if shows and live:
            print("\r" + progress_line(number + 1, last, loss, rate), end="", flush=True)
        elif shows and (number == first or (number + 1) % LOG_EVERY == 0 or number + 1 == last):
            print(progress_line(number + 1, last, loss, rate), flush=True)
        done = number + 1
        due = done == last or (settings.save_every and done % settings.save_every == 0)
        if settings.checkpoint and due:
            checkpoint.save(settings.checkpoint, trainer.model, trainer.optimizer, done)
    if shows and live:
        print()
    history = trainer.history
    history.tokens_per_second = settings.length * max(settings.steps - 2, 0) / steady if steady else rate
    history.compilations = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    if shows:
        history.write(history_path(settings.out, trainer.ranks))
    return history
