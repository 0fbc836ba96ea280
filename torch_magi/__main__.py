"""The command line: what is installed, and what a plan looks like before anything runs.

    python -m torch_magi info
    python -m torch_magi plan --mask causal --total 8192 --cp-size 4
    python -m torch_magi plan --mask document --documents 5000,3192 --cp-size 4 --plot plan.png

`info` prints versions and kernels, `plan` the balance, the bytes and a picture.
"""

from __future__ import annotations

import argparse
import contextlib
import platform
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal, get_args

import torch

import torch_magi
from torch_magi import AttnPlan, PlanConfig, _extension, make_attn_plan, masks
from torch_magi.masks import AttnMask
from torch_magi.ops.flex_attn import choose_backend
from torch_magi.plan.config import Dispatcher
from torch_magi.viz.plan_picture import plan_to_string, plot_plan

DTYPES = ("bfloat16", "float16", "float32", "float64")
MIB = 1 << 20
MOST_PROBED = 512  # head_dim
MASKS = (
    "block_causal",
    "causal",
    "chunk_causal",
    "document",
    "full",
    "prefix_lm",
    "shared_prefix",
    "sliding_window",
)
OPERATORS = (
    "flex_attn_fwd_tiles",
    "flex_attn_bwd_tiles",
    "flex_attn_fwd_sm90",
    "flex_attn_bwd_sm90",
    "merge_state",
    "range_gather",
    "range_scatter_add",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m torch_magi")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    info = commands.add_parser("info", help="print versions, and which devices and operators have kernels")
    info.set_defaults(run=print_info)
    plan = commands.add_parser("plan", help="print balance, bytes and a picture of a plan")
    _add_plan_arguments(plan)
    plan.set_defaults(run=print_plan)
    given = parser.parse_args(arguments)
    try:
        given.run(given)
    except (ValueError, TypeError, ImportError) as error:
        parser.exit(2, f"{parser.prog} {given.command}: {error}\n")
    return 0


# --- info -----------------------------------------------------------------------------------------------


def print_info(_: argparse.Namespace) -> None:
    """Print versions, devices, and which operators have kernels."""
    cuda = torch.version.cuda
    print(f"torch_magi {torch_magi.__version__}")
    print(f"Python     {platform.python_version()} on {platform.system()} {platform.machine()}")
    print(f"torch      {torch.__version__} ({f'CUDA {cuda}' if cuda else 'no CUDA'})")
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    print(f"GPUs       {', '.join(gpus) or 'none'}")
    problem = _extension.explain_missing()
    if problem is not None:
        print(f"operators  {problem}")
        return
    print("operators  built; kernels:")
    for operator in OPERATORS:
        found = [device for device in ("cpu", "cuda") if _extension.has_kernel(operator, device)]
        print(f"  {operator:20} {', '.join(found) or 'none'}")
    print("attention")
    for device in ("cpu", "cuda"):
        for i, line in enumerate(_attention_on(torch.device(device))):
            print(f"  {'' if i else device:20} {line}")


def _attention_on(device: torch.device) -> list[str]:
    """Return which kernels serve which dtypes, and up to which head_dim."""
    served: dict[tuple[tuple[str, int], ...], list[str]] = {}
    for name in DTYPES:
        widest: dict[str, int] = {}
        for head_dim in range(8, MOST_PROBED + 1, 8):
            with contextlib.suppress(NotImplementedError):
                widest[choose_backend(device, getattr(torch, name), (head_dim, head_dim))] = head_dim
        if widest:
            served.setdefault(tuple(widest.items()), []).append(name)
    return [
        f"{', '.join(names)}: "
        + ", ".join(backend + (f" (head_dim up to {n})" if n < MOST_PROBED else "") for backend, n in kernels)
        for kernels, names in served.items()
    ] or ["no kernels"]


# --- plan -----------------------------------------------------------------------------------------------


def _add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--mask", choices=MASKS, default="causal", metavar="MASK",
        help=f"what is attended: {', '.join(MASKS)} (default: causal)")  # fmt: skip
    add("--total", type=int, help="tokens (shared_prefix: behind the prefix); default: those of --documents")
    add("--documents", type=integers, metavar="N,N,...", help="lengths of packed documents (default: one)")
    add("--window", type=integers, metavar="L,R",
        help="sides of a sliding window, -1 is unbounded (sliding_window, document)")  # fmt: skip
    add("--block-size", type=int, help="tokens of a block (block_causal, chunk_causal)")
    add("--prefix", type=int, help="tokens of a prefix (prefix_lm, shared_prefix)")
    add("--cp-size", type=int, default=1, help="ranks that share the sequence (default: 1)")
    add("--rank", type=int, help="print the plan of this rank in full")
    add("--heads", type=heads, default=(8, 8), help="query heads : kv heads (default: 8:8)", metavar="Q:KV")
    add("--head-dim", type=int, default=128, help="size of a head (default: 128)")
    add("--dtype", choices=DTYPES, default="bfloat16", help="of query, key and value (default: bfloat16)")
    add("--dispatcher", choices=get_args(Dispatcher), default="min_heap", help="(default: min_heap)")
    add("--chunk-size", type=int, help="tokens in a chunk (default: chosen)")
    add("--overlap-degree", type=degree, default=1, help="stages in which remote keys arrive, or auto (default: 1)")
    add("--plot", metavar="PATH", help="write a picture instead of characters (needs matplotlib)")


def integers(text: str) -> tuple[int, ...]:
    """Parse "5000,3192"."""
    return tuple(int(part) for part in text.split(","))


def degree(text: str) -> int | Literal["auto"]:
    """Parse "2" or "auto"."""
    return "auto" if text == "auto" else int(text)


def heads(text: str) -> tuple[int, int]:
    """Parse "64:8" into query heads and kv heads; "8" means as many of both."""
    query, _, kv = text.partition(":")
    return int(query), int(kv or query)


def print_plan(given: argparse.Namespace) -> None:
    """Print who computes and receives how much, and a picture."""
    mask = mask_of(given)
    config = PlanConfig(chunk_size=given.chunk_size, dispatcher=given.dispatcher, overlap_degree=given.overlap_degree)

    def plan_of(rank: int) -> AttnPlan:
        heads_q, heads_kv = given.heads
        return make_attn_plan(
            mask, heads_q, heads_kv, given.head_dim, dtype=getattr(torch, given.dtype), cp_size=given.cp_size,
            cp_rank=rank, config=config,
        )  # fmt: skip

    plan = plan_of(given.rank or 0)
    sq, sk = mask.shape
    share = 100 * (1 - mask.sparsity())
    print(f"{given.mask} mask, {sq} x {sk}: {mask.area:,} visible pairs, {share:.2f} % of all")
    _print_ranks(plan)
    if given.rank is not None:
        print(f"\n{plan}")
    if given.plot is None:
        print(f"\n{plan_to_string(plan)}")
        print("(each line is one query row; the characters are the ranks that compute it)")
    else:
        plot_plan(plan, given.plot, all_ranks=[plan_of(rank) for rank in range(given.cp_size)])
        print(f"\npicture: {given.plot}")


def _print_ranks(plan: AttnPlan) -> None:
    row_bytes = plan.num_heads_kv * (plan.head_dim + plan.head_dim_v) * plan.dtype.itemsize
    mean = max(plan.mask.area / plan.cp_size, 1)
    print(f"dispatch: {plan.config.dispatcher}, chunks of {plan.dispatch.chunk_size} tokens\n")
    print("  rank      tokens               pairs  of mean   rows received        MiB")
    per_rank = zip(plan.dispatch.tokens_per_rank, plan.area_per_rank, plan.comm_rows_per_rank, strict=True)
    for rank, (tokens, area, rows) in enumerate(per_rank):
        mib = rows * row_bytes / MIB
        print(f"  {rank:4}  {tokens:10,}  {area:18,}  {area / mean:7.3f}  {rows:14,}  {mib:9.2f}")
    print(f"\nlargest / mean: {plan.imbalance:.4f}")
    everything = (plan.cp_size - 1) * plan.dispatch.total_tokens * row_bytes
    if everything:
        print(
            f"keys and values sent in a forward pass: {plan.comm_bytes / MIB:,.2f} MiB; ring or all-gather: "
            f"{everything / MIB:,.2f} MiB ({100 * plan.comm_bytes / everything:.1f} %)"
        )


# --- masks by name --------------------------------------------------------------------------------------


def mask_of(given: argparse.Namespace) -> AttnMask:
    """Return the mask that the options describe.

    Raises:
        ValueError: if an option that the mask needs is missing.
    """

    def needed(*options: str) -> Any:
        values = [getattr(given, option) for option in options]
        found = [value for value in values if value is not None]
        if not found:
            names = " or ".join(f"--{option.replace('_', '-')}" for option in options)
            raise ValueError(f"--mask {given.mask} needs {names}")
        return found[0]

    cu_seqlens = [0, *accumulate(given.documents or [needed("total", "documents")])]
    total = cu_seqlens[-1] if given.total is None else given.total
    match given.mask:
        case "block_causal":
            return masks.block_causal(cu_seqlens, needed("block_size"), total=total)
        case "causal":
            return masks.causal(total)
        case "chunk_causal":
            return masks.chunk_causal(total, total, needed("block_size"))
        case "document":
            return masks.document(cu_seqlens, causal=True, window_size=given.window, total=total)
        case "full":
            return masks.full(total, total)
        case "prefix_lm":
            return masks.prefix_lm(total, total, needed("prefix"))
        case "shared_prefix":
            return masks.shared_prefix(needed("prefix"), cu_seqlens, total=total)
    return masks.sliding_window(total, total, needed("window"))


if __name__ == "__main__":
    raise SystemExit(main())
