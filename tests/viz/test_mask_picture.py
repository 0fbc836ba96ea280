"""Pictures of masks with matplotlib."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from torch_magi import masks


def test_picture_is_the_mask(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    mask = masks.document([0, 3, 8])
    axes = mask.plot().axes[0]
    assert np.array_equal(axes.images[0].get_array(), mask.to_dense().numpy())
    assert axes.get_title() == repr(mask)
    assert mask.plot(str(tmp_path / "mask.png")) is None
    assert (tmp_path / "mask.png").read_bytes().startswith(b"\x89PNG")


def test_empty_mask_has_a_picture() -> None:
    pytest.importorskip("matplotlib")
    assert masks.full(0, 3).plot() is not None


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        masks.causal(4).plot()
