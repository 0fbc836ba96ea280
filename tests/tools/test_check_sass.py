"""The gate on built kernels notices what it is there for."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
spec = importlib.util.spec_from_file_location("check_sass", ROOT / "tools" / "check_sass.py")
check_sass = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_sass)

LISTING = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;                /* 0x00000a00ff017b82 */
                                                                         /* 0x000fe20000000800 */
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR6][R2.64] ;      /* 0x0000000602048981 */
        /*0020*/              @UP0 STL.64 [R1+0x8], R2 ;                 /* 0x0000080201007387 */
        /*0030*/                   STG.E.128 desc[UR6][R8.64], R4 ;      /* 0x0000000408007986 */
"""


def test_instructions_are_read_with_their_predicates() -> None:
    instructions = check_sass.instructions_of(LISTING)
    assert [i.name for i in instructions] == ["LDC", "LDG", "STL", "STG"]
    assert [i.address for i in instructions] == [0, 0x10, 0x20, 0x30]
    assert instructions[3].text.startswith("STG.E.128 desc")


def kernel(*texts: str) -> list:
    """Return instructions at 0x0, 0x10, ..."""
    return [check_sass.Instruction(16 * i, text) for i, text in enumerate(texts)]


def test_local_memory_and_copies() -> None:
    instructions = check_sass.instructions_of(LISTING)
    assert check_sass.problems_of("any_kernel", instructions) == ["1 STL: local memory is used"]
    assert check_sass.problems_of("gather_rowsI5uint4E", kernel("LDG.E.64", "STG.E.128")) == ["no LDG.E.128"]
    assert check_sass.problems_of("gather_rowsI5uint4E", kernel("LDG.E.128.CONSTANT", "STG.E.128")) == []


FORWARD = "flex_attn_fwdINS1_5ShapeILi128ELi128ELi128ELi2ELi2EEELb1ELb0EEEvNS1_13ForwardParamsE"
BOTH = "flex_attn_bwd_dkdvINS1_9DkDvShapeILi128ELi128ELb1ELb1ELi2ELi3ELi3EEELb1ELb0EEEvNS1_10DkDvParamsE"
MOVE, LOAD, STORE = "R2UR UR4, R1 ", "LDL R3, [R1] ", "STL [R1], R2 "
TEXTS = {"H": "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24", "E": "MUFU.EX2 R1, R2"}


def texts(order: str) -> list[str]:
    """Return the texts of an order as LOOPS has it."""
    return [TEXTS.get(c) or f"WARPGROUP.DEPBAR.LE gsb0, 0x{c}" for c in order]


def looped(order: str, *more: str, before: tuple[str, ...] = (), after: tuple[str, ...] = ()) -> list:
    """Return a kernel: a first tile, a loop, products after it, an outer loop, a wait that goes on in the loop."""
    first = [*before, *texts("H0E")]
    loop = [*texts(order), *more, f"BRA 0x{16 * len(first):x} "]
    end = len(first) + len(loop)
    return kernel(*first, *loop, *texts("H0"), *after, "BRA.U UP0, 0x0 ", "BRA 0xfff0 ", f"BRA 0x{16 * (end - 2):x} ")


def test_order_of_a_tile_loop() -> None:
    assert check_sass.problems_of(FORWARD, looped("HHH1EE0EEE")) == []
    assert check_sass.problems_of(FORWARD, looped("H1E0")) == ["the loop's order is H1E0, not H1E0E"]
    assert check_sass.problems_of(FORWARD, looped("H0H1E0E")) == ["the loop's order is H0H1E0E, not H1E0E"]
    assert check_sass.problems_of(FORWARD, looped("H10E")) == ["the loop's order is H10E, not H1E0E"]
    assert check_sass.problems_of(FORWARD, kernel(*texts("H1E0E"))) == ["no loop with products"]
    assert check_sass.problems_of("new", looped("H1E0E")) == ["a kernel with products that LOOPS does not know"]


def test_a_product_is_waited_for_where_the_softcap_of_a_name_says() -> None:
    assert check_sass.problems_of(FORWARD.replace("ELb0EEEv", "ELb1EEEv"), looped("H10E")) == []
    one_gradient = BOTH.replace("ILi128ELi128ELb1ELb1", "ILi128ELi128ELb0ELb1")
    assert check_sass.problems_of(one_gradient, looped("H1E0")) == []
    assert check_sass.problems_of(one_gradient.replace("ELb0EEEv", "ELb1EEEv"), looped("H1E0E0")) == []
    assert check_sass.problems_of(BOTH, looped("H1H1E0")) == []
    assert check_sass.problems_of(BOTH.replace("ELb1ELb1", "ELb1ELb0"), looped("H2E10")) == []
    assert check_sass.problems_of(BOTH, looped("H2E10")) == ["the loop's order is H2E10, not H1H1E0"]


def test_moves_in_a_tile_loop() -> None:
    most = check_sass.MAX_MOVES
    assert check_sass.problems_of(FORWARD, looped("H1E0E", *[MOVE] * most, before=(MOVE,), after=(MOVE,))) == []
    assert check_sass.problems_of(FORWARD, looped("H1E0E", *[MOVE] * (most + 1))) == [f"{most + 1} R2UR in the loop"]
    dq = "flex_attn_bwd_dqINS2_5ShapeILi64ELi64ELi112ELi2ELi3ELi2EEELb1ELb1EEEvNS1_8DqParamsE"
    most = check_sass.value_for(check_sass.MOVES, dq, 0)
    assert check_sass.problems_of(dq, looped("H2E10", *[MOVE] * most)) == []
    assert check_sass.problems_of(dq, looped("H2E10", *[MOVE] * (most + 1))) == [f"{most + 1} R2UR in the loop"]


def test_local_memory_of_kernels_with_products() -> None:
    assert check_sass.problems_of(FORWARD, looped("H1E0E", LOAD)) == ["1 LDL in the loop"]
    assert check_sass.problems_of(FORWARD, looped("H1E0E", before=(STORE,))) == ["1 STL: local memory is used"]
    assert check_sass.problems_of(FORWARD, looped("H1E0E", after=(LOAD,))) == ["1 LDL: local memory is used"]
    most = check_sass.value_for(check_sass.SPILLS, BOTH, 0)
    assert check_sass.problems_of(BOTH, looped("H1H1E0", before=(STORE,) * most)) == []
    assert check_sass.problems_of(BOTH, looped("H1H1E0", STORE, before=(STORE,) * most)) == ["1 STL in the loop"]
    too_many = looped("H1H1E0", before=(STORE,) * most, after=(LOAD,))
    assert check_sass.problems_of(BOTH, too_many) == [
        "1 LDL: local memory is used",
        f"{most} STL: local memory is used",
    ]
