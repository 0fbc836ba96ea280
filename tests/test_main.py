"""The command line: python -m torch_magi."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest
import torch

import torch_magi
from torch_magi import masks
from torch_magi.__main__ import MASKS, integers, main, mask_of


def run(arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments.split()) == 0
    return capsys.readouterr().out


def options(mask: str, **given: object) -> argparse.Namespace:
    names = ("total", "documents", "window", "block_size", "prefix")
    return argparse.Namespace(mask=mask, **{name: given.get(name) for name in names})


def test_info_says_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    text = run("info", capsys)
    assert f"torch_magi {torch_magi.__version__}" in text
    assert torch.__version__ in text
    assert "range_gather         cpu" in text
    assert "cpu                  bfloat16, float16, float32, float64: cpu\n" in text


def test_info_says_which_kernels_serve_what(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose(device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int]) -> str:
        if device.type == "cpu" or dtype == torch.float64 or max(head_dims) > 256:
            raise NotImplementedError
        return "triton" if dtype == torch.float32 or max(head_dims) > 128 else "sm90"

    monkeypatch.setattr(torch_magi.__main__, "choose_backend", choose)
    assert run("info", capsys).endswith(
        "attention\n"
        "  cpu                  no kernels\n"
        "  cuda                 bfloat16, float16: sm90 (head_dim up to 128), triton (head_dim up to 256)\n"
        "                       float32: triton (head_dim up to 256)\n"
    )


def test_info_without_operators(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_magi._extension, "_problem", "the operator library was not built")
    assert "the operator library was not built; reinstall" in run("info", capsys)


def test_plan_prints_balance_bytes_and_picture(capsys: pytest.CaptureFixture[str]) -> None:
    text = run("plan --mask document --documents 4,12 --cp-size 2 --chunk-size 1 --heads 4:2 --head-dim 8", capsys)
    assert "document mask, 16 x 16: 88 visible pairs, 34.38 % of all" in text
    plan = torch_magi.make_attn_plan(
        masks.document([0, 4, 16]), 4, 2, 8, cp_size=2, config=torch_magi.PlanConfig(chunk_size=1)
    )
    for area, rows in zip(plan.area_per_rank, plan.comm_rows_per_rank, strict=True):
        assert any(f"  {area}  " in line and f"  {rows}  " in line for line in text.splitlines())
    picture = text.split("\n\n")[-1].splitlines()[:16]
    for row, line in enumerate(picture):
        rank = str(int(row not in plan.position_ids))
        assert line == "".join(rank if seen else "." for seen in plan.mask.to_dense()[row])


def test_plan_prints_one_rank_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    text = run("plan --total 64 --cp-size 4 --rank 2 --overlap-degree 2 --dtype float32", capsys)
    assert "AttnPlan of rank 2 of 4" in text and "stage 2:" in text


def test_plan_on_one_rank_sends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert "ring" not in run("plan --total 8", capsys)


def test_plan_draws_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    assert f"picture: {path}" in run(f"plan --total 64 --cp-size 2 --plot {path}", capsys)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (options("block_causal", documents=(4, 3), block_size=2), masks.block_causal([0, 4, 7], 2)),
        (options("causal", total=5), masks.causal(5)),
        (options("chunk_causal", total=5, block_size=2), masks.chunk_causal(5, 5, 2)),
        (options("document", documents=(2, 3), window=(1, 0)), masks.document([0, 2, 5], window_size=(1, 0))),
        (options("document", documents=(2, 3), total=7), masks.document([0, 2, 5], total=7)),
        (options("full", total=5), masks.full(5, 5)),
        (options("prefix_lm", total=5, prefix=2), masks.prefix_lm(5, 5, 2)),
        (options("shared_prefix", documents=(2, 1), prefix=2), masks.shared_prefix(2, [0, 2, 3])),
        (options("sliding_window", total=5, window=(1, 0)), masks.sliding_window(5, 5, (1, 0))),
    ],
    ids=lambda value: value.mask if isinstance(value, argparse.Namespace) else "",
)
def test_mask_by_name(given: argparse.Namespace, expected: masks.AttnMask) -> None:
    assert mask_of(given) == expected


def test_every_mask_is_tested() -> None:
    tested = next(m for m in test_mask_by_name.pytestmark if m.name == "parametrize").args[1]
    assert {given.mask for given, _ in tested} == set(MASKS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "the following arguments are required: COMMAND"),
        ("draw", "invalid choice: 'draw'"),
        ("plan --mask causal", "--mask causal needs --total or --documents"),
        ("plan --mask sliding_window --total 8", "--mask sliding_window needs --window"),
        ("plan --mask block_causal --total 8", "--mask block_causal needs --block-size"),
        ("plan --mask prefix_lm --total 8", "--mask prefix_lm needs --prefix"),
        ("plan --mask prefix_lm --total 8 --prefix 9", "prefix must be at most sk = 8, got 9"),
        ("plan --mask document --documents 4,-1", "must"),
        ("plan --mask document --documents 4,x", "argument --documents: invalid"),
        ("plan --total 8 --cp-size 0", "cp_size must be positive, got 0"),
        ("plan --total 8 --cp-size 2 --rank 2", "cp_rank must be in [0, 2), got 2"),
        ("plan --total 8 --heads 3:2", "num_heads_q must be a multiple of num_heads_kv, got 3 and 2"),
        ("plan --total 8 --window 1,2,3 --mask document", "window_size must be a pair"),
        ("plan --total -1", "must be 0 or more, got -1"),
    ],
)
def test_refusals(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(arguments.split())
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_plot_without_matplotlib(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit) as raised:
        main("plan --total 8 --cp-size 2 --plot x.png".split())
    assert raised.value.code == 2
    assert "pip install matplotlib" in capsys.readouterr().err


def test_integers() -> None:
    assert integers("5000,3192") == (5000, 3192)
