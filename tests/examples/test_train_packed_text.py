"""The main job: its batches, its command line, its resuming, and that several ranks train as one does."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import torch_magi  # noqa: E402
import train_packed_text as command  # noqa: E402
from packed_text import data  # noqa: E402
from packed_text import train as training  # noqa: E402
from packed_text.train import History, Settings, plan_of, train  # noqa: E402
from torch_magi.masks import AttnMask  # noqa: E402
from torch_magi.plan import StagePlan  # noqa: E402
from torch_magi.testing import run_ranks  # noqa: E402

TEXT = "def f(x):\n    return x + 1\n\n" * 40 + "The quick brown fox jumps over the lazy dog. " * 60


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Settings of a small run on files of the repository."""
    return Settings(data=EXAMPLES.parent / "torch_magi", out=tmp_path, steps=25, length=512, compile=False)


# --- batches --------------------------------------------------------------------------------------------


def test_corpus_takes_text_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text(TEXT)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.md").write_text("ümläut " * 10)
    (tmp_path / "binary").write_bytes(b"text\0" * 100)
    (tmp_path / "latin1").write_bytes(b"\xe4\xf6" * 100)
    (tmp_path / "short").write_text("x")
    (tmp_path / ".hidden").write_text(TEXT)
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "y.py").write_text(TEXT)
    files = data.read_corpus(tmp_path, 1 << 20)
    assert [bytes(f).decode() for f in files] == ["ümläut " * 10, TEXT]
    assert len(data.read_corpus(tmp_path, 10)) == 1, "reads no further than it needs to"
    assert len(data.read_corpus(tmp_path, 1 << 20, (tmp_path / "a", tmp_path / "b"))) == 1


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_corpus_without_text_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match=f"--data must be a folder of text files.*{name}"):
        data.read_corpus(tmp_path / name, 100)


@pytest.mark.parametrize("length", [32, 100, 4096])
def test_batch_is_packed_documents(length: int) -> None:
    corpus = [np.frombuffer(TEXT.encode(), np.uint8), np.frombuffer(b"only a few bytes", np.uint8)]
    batch = data.make_batch(corpus, length, seed=0, step=3)
    again = data.make_batch(corpus, length, seed=0, step=3)
    other = data.make_batch(corpus, length, seed=0, step=4)
    assert torch.equal(batch.tokens, again.tokens) and not torch.equal(batch.tokens, other.tokens)
    assert batch.cu_seqlens[0] == 0 and batch.cu_seqlens[-1] == length == len(batch.tokens)
    for begin, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        document = batch.tokens[begin:end]
        assert document[-1] == data.END and (document[:-1] != data.END).all()
        assert torch.equal(batch.positions[begin:end], torch.arange(end - begin))
        assert torch.equal(batch.targets[begin : end - 1], document[1:])
        assert batch.targets[end - 1] == data.NO_TARGET
    assert batch.num_targets == (batch.targets != data.NO_TARGET).sum()


# --- several ranks train as one does --------------------------------------------------------------------


def train_on_rank(rank: int, group: object, settings: Settings) -> History:
    """Train; for `run_ranks`."""
    return train(settings)


def train_without_last_stage(rank: int, group: object, settings: Settings) -> History:
    """Train with the last stage's keys hidden: what a lost exchange would do."""

    def broken_plan(*args: object) -> object:
        plan = plan_of(*args)
        *kept, last = plan.stages
        sq, sk = last.mask.shape
        hidden = AttnMask.from_slices([], [], [], sq, sk)
        vars(plan)["stages"] = (*kept, StagePlan(hidden, last.comm))  # past the guard against changes
        return plan

    training.plan_of = broken_plan
    try:
        return train(settings)
    finally:
        training.plan_of = plan_of


def losses_of(fn: object, ranks: int, settings: Settings) -> np.ndarray:
    histories = run_ranks(fn, ranks, "processes", (settings,), timeout=300)
    for history in histories[1:]:
        assert history.losses == histories[0].losses, "every rank reports the loss of the whole batch"
    return np.array(histories[0].losses)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """The losses of one rank."""
    out = tmp_path_factory.mktemp("single")
    settings = Settings(data=EXAMPLES.parent / "torch_magi", out=out, steps=25, length=512, compile=False)
    return losses_of(train_on_rank, 1, settings)


@pytest.mark.parametrize(
    ("ranks", "dispatcher", "overlap_degree"), [(4, "min_heap", 2), (3, "head_tail", 0), (2, "sequential", 1)]
)
def test_ranks_train_as_one(
    settings: Settings, single: np.ndarray, ranks: int, dispatcher: str, overlap_degree: int
) -> None:
    settings = replace(settings, dispatcher=dispatcher, overlap_degree=overlap_degree)
    losses = losses_of(train_on_rank, ranks, settings)
    assert abs(losses - single).max() <= 1e-4
    assert losses[0] - losses[-1] > 1.0, losses
    history = History.read(training.history_path(settings.out, ranks))
    assert history.losses == losses.tolist()
    assert 0 < sum(history.bytes_sent) < sum(history.bytes_all_gather)


def test_comparison_notices_a_lost_stage(settings: Settings, single: np.ndarray) -> None:
    """Negative control: without the keys of one remote stage the losses are others."""
    losses = losses_of(train_without_last_stage, 4, settings)
    assert abs(losses - single).max() > 1e-2


def test_compiled_training_compiles_once(settings: Settings, single: np.ndarray) -> None:
    settings = replace(settings, compile=True, steps=6)
    histories = run_ranks(train_on_rank, 2, "processes", (settings,), timeout=500)
    assert [h.compilations for h in histories] == [1, 1], "each step has other documents, splits and lengths"
    assert abs(np.array(histories[0].losses) - single[:6]).max() <= 1e-4


def test_resumed_training_goes_on(settings: Settings, single: np.ndarray) -> None:
    first = replace(settings, steps=4, checkpoint=settings.out / "saved", save_every=3)
    losses_of(train_on_rank, 2, first)
    assert sorted(p.name for p in (settings.out / "saved").iterdir()) == ["step_3", "step_4"]
    rest = replace(settings, steps=5, resume=settings.out / "saved" / "step_4")
    for ranks in (1, 2):
        assert abs(losses_of(train_on_rank, ranks, rest) - single[4:9]).max() <= 1e-4
    wrong = replace(settings, resume=settings.out / "saved")
    with pytest.raises(SystemExit, match="--resume must be a checkpoint"):
        run_ranks(train_on_rank, 1, "processes", (wrong,))


# --- the command line -----------------------------------------------------------------------------------


def test_command_trains_compares_and_draws(tmp_path: Path) -> None:
    """The results lie in the data folder here: the second run must not train on those of the first."""
    (tmp_path / "a.txt").write_text(TEXT)
    arguments = f"--data {tmp_path} --out {tmp_path}/out --ranks 2 --steps 3 --length 256 --no-compile --device cpu"
    run = subprocess.run(
        [sys.executable, EXAMPLES / "train_packed_text.py", *arguments.split()],
        capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "PYTHONPATH": str(Path(torch_magi.__file__).parents[1])},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    difference = run.stdout.split("max loss difference, 2 ranks vs 1: ")[1].split()[0]
    assert float(difference) <= 1e-4
    assert "step 3/3" in run.stdout and "ring or all-gather" in run.stdout
    for name in ("history_2_ranks.json", "history_1_ranks.json", "plan.png", "loss.png"):
        assert (tmp_path / "out" / name).stat().st_size > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--length", "31"], "--length must be at least 32, got 31"),
        (["--ranks", "0"], "--ranks must be at least 1, got 0"),
        (["--overlap-degree", "-1"], "--overlap-degree must be at least 0, got -1"),
        (["--dispatcher", "best"], "dispatcher must be one of"),
        (["--save-every", "5"], "--save-every needs --checkpoint"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
        (["--data", "x", "--out", "x/"], "--out must be another folder than --data"),
    ],
)
def test_command_refuses(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train_packed_text.py", *arguments])
    with pytest.raises(SystemExit) as raised:
        command.parse_arguments()
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_settings_become_arguments_and_come_back(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = replace(settings, compile=False, checkpoint=tmp_path / "saved", save_every=7, overlap_degree=0)
    monkeypatch.setattr(sys, "argv", ["train_packed_text.py", *given.to_arguments()])
    assert command.settings_of(command.parse_arguments()) == given
