import pytest

from torch_magi.masks import MaskType


@pytest.mark.parametrize("kind", list(MaskType))
@pytest.mark.parametrize("sq", range(6))
@pytest.mark.parametrize("sk", range(6))
def test_area_counts_the_visible_pairs(kind: MaskType, sq: int, sk: int) -> None:
    pairs = sum(kind.visible(i, j, sq, sk) for i in range(sq) for j in range(sk))
    assert kind.area(sq, sk) == pairs


def test_causal_is_aligned_at_the_bottom_right() -> None:
    rows = [[MaskType.CAUSAL.visible(i, j, 2, 5) for j in range(5)] for i in range(2)]
    assert rows == [[True, True, True, True, False], [True] * 5]


def test_parse() -> None:
    assert MaskType.parse("inv_causal") is MaskType.parse(2) is MaskType.INV_CAUSAL
    with pytest.raises(ValueError, match=r"must be one of FULL \(0\), .* got 'casual'"):
        MaskType.parse("casual")
    with pytest.raises(ValueError, match="got 4"):
        MaskType.parse(4)
    with pytest.raises(TypeError, match="got True"):
        MaskType.parse(True)
