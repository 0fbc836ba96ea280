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
    names = [op.split()[0] for op in check_sass.INSTRUCTION.findall(LISTING)]
    assert names == ["LDC", "LDG.E.128", "STL.64", "STG.E.128"]


def test_problems() -> None:
    instructions = check_sass.INSTRUCTION.findall(LISTING)
    assert check_sass.problems_of("any_kernel", instructions) == ["1 STL: local memory is used"]
    assert check_sass.problems_of("gather_rowsI5uint4E", ["LDG.E.64", "STG.E.128"]) == ["no LDG.E.128"]
    assert check_sass.problems_of("gather_rowsI5uint4E", ["LDG.E.128.CONSTANT", "STG.E.128"]) == []


PRODUCT = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24"
WAIT_FIRST, WAIT_BOTH = "WARPGROUP.DEPBAR.LE gsb0, 0x1", "WARPGROUP.DEPBAR.LE gsb0, 0x0"


def test_loops_of_products() -> None:
    good = [PRODUCT, WAIT_BOTH, "MUFU.EX2 R1, R2", PRODUCT, "R2UR UR4, R1 ", PRODUCT, WAIT_FIRST, WAIT_BOTH]
    assert check_sass.problems_of("kernel", good) == []
    moved = [PRODUCT, WAIT_BOTH, PRODUCT, *["R2UR UR4, R1 "] * 3, PRODUCT, WAIT_FIRST, WAIT_BOTH]
    assert check_sass.problems_of("kernel", moved) == ["3 R2UR among the products of the loop"]
    spilled = ["STL [R1], R2 ", PRODUCT, WAIT_BOTH, PRODUCT, "LDL R3, [R1] ", PRODUCT, WAIT_FIRST, WAIT_BOTH]
    assert check_sass.problems_of("kernel", spilled) == ["1 LDL: local memory is used"]
    assert check_sass.problems_of("kernel", [*spilled[:4], *spilled[5:], "LDL R3, [R1] "]) == []
    serial = [PRODUCT, WAIT_BOTH, PRODUCT, WAIT_BOTH]
    assert check_sass.problems_of("kernel", serial) == ["0 waits for the first of two products, expected 1"]


def test_loops_of_three_products() -> None:
    name, exponential = "flex_attn_bwd_dq", "MUFU.EX2 R1, R2"
    waits = [f"WARPGROUP.DEPBAR.LE gsb0, 0x{pending}" for pending in (2, 1, 0)]
    first_tile = [PRODUCT, PRODUCT, WAIT_FIRST, exponential, WAIT_BOTH]
    started = [*first_tile, PRODUCT, PRODUCT, PRODUCT]
    rest = [PRODUCT, WAIT_BOTH]
    good = [*started, waits[0], exponential, exponential, waits[1], "FMUL R1, R2, R3 ", waits[2], *rest]
    assert check_sass.problems_of(name, good) == []
    assert check_sass.problems_of("flex_attn_fwd", good) == ["2 waits for the first of two products, expected 1"]
    hoisted = [*started, waits[0], exponential, waits[1], exponential, waits[2], *rest]
    assert check_sass.problems_of(name, hoisted) == ["1 of 2 exponentials after the second wait"]
    before_all = [*started, waits[0], waits[1], waits[2], exponential, *rest]
    assert check_sass.problems_of(name, before_all) == ["0 of 0 exponentials after the second wait"]
    merged = [*started, waits[0], exponential, waits[2], *rest]
    assert check_sass.problems_of(name, merged) == ["the loop does not wait for its three products one after the other"]
    moved = [*good[:6], *["R2UR UR4, R1 "] * 3, *good[6:]]
    assert check_sass.problems_of(name, moved) == ["3 R2UR among the products of the loop"]
    serial = [*first_tile, PRODUCT, WAIT_BOTH]
    assert check_sass.problems_of(name, serial) == ["0 waits for the first of three products, expected 1"]
