"""Run a function on several ranks of this machine.

threads     a rank is a thread; 5 to 20 ms a call. For eager code: torch.compile does not work in them.
processes   a rank is a process with gloo, from a fork server; 0.1 s a call after the first.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import multiprocessing
import multiprocessing.connection
import os
import pickle
import queue
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torch_magi.masks import AttnMask
from torch_magi.plan import AttnPlan, PlanConfig, make_attn_plan
from torch_magi.testing.reference import Results, Runner, make_runner

Tensor = torch.Tensor
Backend = Literal["threads", "processes"]

_one_world = threading.Lock()  # torch keeps one world of threads


class RankError(RuntimeError):
    """The cause of an exception that `run_ranks` re-raises: says which ranks failed, and where."""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    backend: Backend = "threads",
    args: Sequence[Any] = (),
    *,
    timeout: float = 120.0,
) -> list[Any]:
    """Call `fn(rank, group, *args)` on every rank of a group and return the results, by rank.

    `group` is the default process group of all ranks.

    Args:
        fn: with "processes" a function at the top level of a module, as it is imported again there; its
            arguments and results are pickled. It sees its module as imported, not what a test changed in it.
        world_size: number of ranks.
        backend: "threads" (they share torch's global random numbers, and cannot compile) or "processes".
        args: the same for every rank.
        timeout: seconds for all of it.

    Raises:
        Exception: what the first rank that failed raised; its cause is a `RankError` with the rank.
        TimeoutError: naming the ranks that had not returned; threads among them are left behind.

    Example:
        >>> run_ranks(lambda rank, group: rank * group.size(), 3)
        [0, 3, 6]
    """
    if world_size < 1:
        raise ValueError(f"world_size must be positive, got {world_size}")
    if backend == "threads":
        return _run_threads(fn, world_size, args, timeout)
    if backend == "processes":
        return _run_processes(fn, world_size, args, timeout)
    raise ValueError(f"backend must be 'threads' or 'processes', got {backend!r}")


# --- threads ---


def _run_threads(fn: Callable[..., Any], world_size: int, args: Sequence[Any], timeout: float) -> list[Any]:
    try:
        from torch.testing._internal.distributed import multi_threaded_pg as threaded
    except ImportError as error:
        raise ImportError(
            "ranks as threads need torch.testing, which needs the package expecttest; "
            "pip install 'torch_magi[test]', or use backend='processes'"
        ) from error

    wake: Callable[[BaseException], None] = threaded.ProcessLocalGroup.exception_handle  # the ranks that wait
    results: list[Any] = [None] * world_size
    ended: queue.SimpleQueue[tuple[int, BaseException | None]] = queue.SimpleQueue()

    def work(rank: int, store: Any) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
            results[rank] = fn(rank, dist.group.WORLD, *args)
            ended.put((rank, None))
        except BaseException as error:
            ended.put((rank, error))
            wake(error)
        finally:
            if dist.is_initialized():
                with contextlib.suppress(AttributeError):  # 2.11 looks for something that its threads lack
                    dist.destroy_process_group()

    store = torch._C._distributed_c10d.HashStore()
    threads = [threading.Thread(target=work, args=(r, store), name=f"rank {r}", daemon=True) for r in range(world_size)]
    with _one_world:
        _isolate_threads(True)
        threaded._install_threaded_pg()
        try:
            for thread in threads:
                thread.start()
            failures = _wait_for_threads(ended, world_size, timeout)
        except TimeoutError as error:
            wake(error)
            raise
        finally:
            for thread in threads:
                thread.join(1.0)
            threaded.ProcessLocalGroup.reset()
            threaded._uninstall_threaded_pg()
            _isolate_threads(False)
    if failures:
        rank, failure = failures[0]
        others = [r for r, _ in failures[1:]]
        raise failure from RankError(f"raised on rank {rank} of {world_size}" + _others(others))
    return results


def _isolate_threads(on: bool) -> None:
    """Let every thread have its own registry of process groups."""
    torch._C._distributed_c10d._set_thread_isolation_mode(on)  # type: ignore[attr-defined]


def _wait_for_threads(
    ended: queue.SimpleQueue[tuple[int, BaseException | None]], world_size: int, timeout: float
) -> list[tuple[int, BaseException]]:
    """Return the ranks that failed with their exceptions, the first one first."""
    deadline = time.monotonic() + timeout
    running = set(range(world_size))
    failures: list[tuple[int, BaseException]] = []
    while running:
        try:
            rank, error = ended.get(timeout=max(deadline - time.monotonic(), 0.0))
        except queue.Empty:
            if failures:
                return failures
            raise TimeoutError(f"ranks {sorted(running)} of {world_size} did not return within {timeout} s") from None
        running.discard(rank)
        if error is not None and not (failures and isinstance(error, SystemExit)):  # SystemExit: was woken
            failures.append((rank, error))
            deadline = min(deadline, time.monotonic() + 5.0)
    return failures


def _others(ranks: list[int]) -> str:
    return f"; ranks {sorted(ranks)} failed too" if ranks else ""


# --- processes ---


def _run_processes(fn: Callable[..., Any], world_size: int, args: Sequence[Any], timeout: float) -> list[Any]:
    where = _address_of(fn)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch", "torch.distributed.tensor", "torch.distributed.fsdp", "torch_magi.testing.local_ranks"]
    )
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        processes, pipes = [], []
        try:
            for rank in range(world_size):
                receive, send = context.Pipe(duplex=False)
                process = context.Process(
                    target=_process_main,
                    args=(send, where, rank, world_size, store, pickle.dumps(tuple(args)), timeout),
                    name=f"rank {rank}",
                    daemon=True,
                )
                process.start()
                send.close()
                processes.append(process)
                pipes.append(receive)
            results, failures = _collect(pipes, time.monotonic() + timeout, timeout)
            for process in processes:
                process.join(0.0 if failures else 5.0)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                    process.join()
            for pipe in pipes:
                pipe.close()
    if failures:
        rank, error, text = failures[0]
        others = [r for r, _, _ in failures[1:]]
        raise error from RankError(f"raised on rank {rank} of {world_size}{_others(others)}:\n{text}")
    return results


def _collect(
    pipes: list[Any], deadline: float, timeout: float
) -> tuple[list[Any], list[tuple[int, BaseException, str]]]:
    """Return what the ranks sent, and the failures, the first one first."""
    results: list[Any] = [None] * len(pipes)
    failures: list[tuple[int, BaseException, str]] = []
    waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:
        ready = multiprocessing.connection.wait(list(waiting), max(deadline - time.monotonic(), 0.0))
        if not ready:
            if failures:
                break
            raise TimeoutError(f"ranks {sorted(waiting.values())} of {len(pipes)} did not return within {timeout} s")
        pipe: Any
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                succeeded, content, text = pickle.loads(pipe.recv_bytes())
            except EOFError:
                succeeded, content, text = False, RuntimeError(f"rank {rank} died without a result"), ""
            if succeeded:
                results[rank] = content
            else:
                failures.append((rank, content, text))
                deadline = min(deadline, time.monotonic() + 0.5)  # the others may wait for this rank forever
    return results, failures


def _address_of(fn: Callable[..., Any]) -> tuple[str, str, str]:
    """Return module name, file and qualified name of a function that another process can import."""
    name = getattr(fn, "__qualname__", repr(fn))
    if not inspect.isfunction(fn) or "<" in name:
        raise ValueError(
            f"fn must be a function at the top level of a module for backend='processes', got {name}; "
            "pass what it closes over in args"
        )
    return fn.__module__, inspect.getfile(fn), name


def _import_function(where: tuple[str, str, str]) -> Callable[..., Any]:
    module_name, file, qualified_name = where
    if module_name == "__main__":
        module_name = "__mp_main__"  # what multiprocessing calls it here
    if module_name not in sys.modules:
        # By file: a test module is rarely on the path of another process.
        spec = importlib.util.spec_from_file_location(module_name, file)
        assert spec is not None and spec.loader is not None
        module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    found: Any = sys.modules[module_name]
    for part in qualified_name.split("."):
        found = getattr(found, part)
    function: Callable[..., Any] = found
    return function


def _process_main(
    pipe: Any,
    where: tuple[str, str, str],
    rank: int,
    world_size: int,
    store: str,
    args: bytes,
    timeout: float,
) -> None:
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # Inductor's own workers would outlive the rank
    try:
        fn = _import_function(where)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        result = fn(rank, dist.group.WORLD, *pickle.loads(args))
        message = pickle.dumps((True, result, ""))
    except BaseException as error:
        pipe.send_bytes(_failure(error))
        pipe.close()
        os._exit(1)  # a collective that hangs must not keep the process
    pipe.send_bytes(message)
    pipe.close()
    dist.barrier()
    dist.destroy_process_group()


def _failure(error: BaseException) -> bytes:
    text = traceback.format_exc()
    try:
        message = pickle.dumps((False, error, text))
        pickle.loads(message)
    except Exception:  # exceptions need not be picklable
        message = pickle.dumps((False, RuntimeError(f"{type(error).__name__}: {error}"), text))
    return message


# --- attention on several ranks ---


def context_parallel_runner(
    world_size: int,
    config: PlanConfig | None = None,
    backend: Backend = "threads",
    **options: Any,
) -> Runner:
    """Return a runner (see `reference.make_runner`) of `torch_magi.context_parallel_attn` on local ranks.

    Rows are dealt out by `plan.position_ids`, and the ranks' results put together by them again; the gradient
    of a sink is summed over ranks. Rows that more or fewer than one rank holds make it fail.

    Args:
        world_size: number of ranks.
        config: of the plans.
        backend: as in `run_ranks`.
        options: keyword arguments of every call, such as deterministic and kernel_options.
    """

    def run(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: AttnMask,
        *,
        scale: float | None = None,
        softcap: float = 0.0,
        sink: Tensor | None = None,
        dout: Tensor | None = None,
        dlse: Tensor | None = None,
    ) -> Results:
        tensors = {"query": query, "key": key, "value": value, "sink": sink, "dout": dout, "dlse": dlse}
        plan_options = {
            "num_heads_q": query.shape[1], "num_heads_kv": key.shape[1], "head_dim": query.shape[2],
            "head_dim_v": value.shape[2], "dtype": query.dtype, "cp_size": world_size, "config": config,
        }  # fmt: skip
        call = {"scale": scale, "softcap": softcap, **options}
        parts = run_ranks(_attention_of_rank, world_size, backend, (mask, plan_options, tensors, call))
        return _put_together([p[0] for p in parts], [p[1] for p in parts], len(query), sink)

    return run


def _attention_of_rank(
    rank: int, group: dist.ProcessGroup, mask: AttnMask, plan_options: dict[str, Any],
    tensors: dict[str, Tensor | None], call: dict[str, Any],
) -> tuple[Tensor, Results]:  # fmt: skip
    plan = make_attn_plan(mask, cp_rank=rank, **plan_options)
    ranks_per_node = plan.config.ranks_per_node
    where: dist.ProcessGroup | DeviceMesh = group
    if ranks_per_node is not None:
        where = init_device_mesh("cpu", (group.size() // ranks_per_node, ranks_per_node))
    rows = plan.position_ids
    local = {n: x if x is None or (n == "sink" and x.ndim == 2) else x[rows] for n, x in tensors.items()}
    run = make_runner(attention_on(plan, where, **call))
    results = run(local["query"], local["key"], local["value"], mask, sink=local["sink"], dout=local["dout"],
                  dlse=local["dlse"])  # fmt: skip
    return rows, results


def attention_on(
    plan: AttnPlan, group: dist.ProcessGroup | DeviceMesh | None, **options: Any
) -> Callable[..., tuple[Tensor, Tensor, Tensor | None]]:
    """Return a function for `reference.make_runner` that computes one rank's rows with a ready plan.

    Args:
        plan: this rank's.
        group: of all ranks; for a plan with `ranks_per_node` a mesh of shape (nodes, ranks_per_node).
        options: keyword arguments of `torch_magi.context_parallel_attn`.
    """
    from torch_magi.attention import AuxRequest, context_parallel_attn

    def attention(
        query: Tensor, key: Tensor, value: Tensor, mask: AttnMask, **more: Any
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        request = AuxRequest(lse=True, max_logits=True)
        merged = {**more, **options}
        result: Any = context_parallel_attn(query, key, value, plan, group, return_aux=request, **merged)
        out, aux = result
        return out, aux.lse, aux.max_logits

    return attention


def _put_together(rows: list[Tensor], parts: list[Results], total: int, sink: Tensor | None) -> Results:
    """Return results in the order of the whole sequence."""
    order = torch.cat(rows).cpu()
    if not torch.equal(order.sort().values, torch.arange(total)):
        raise AssertionError(f"the ranks hold rows {order.tolist()}, not each of {total} rows once")

    def gather(name: str) -> Tensor | None:
        values = [getattr(p, name) for p in parts]
        if values[0] is None:
            return None
        stacked = torch.cat(values)
        return torch.empty_like(stacked).index_copy_(0, order.to(stacked.device), stacked)

    maxima = [p.max_logits for p in parts if p.max_logits is not None]
    for rank, maximum in enumerate(maxima):
        if not torch.equal(maximum, maxima[0]):
            raise AssertionError(f"max_logits is {maximum} on rank {rank}, but {maxima[0]} on rank 0")
    dsink = gather("dsink") if sink is None or sink.ndim == 3 else None
    if sink is not None and sink.ndim == 2 and parts[0].dsink is not None:
        dsink = torch.stack([p.dsink for p in parts if p.dsink is not None]).sum(0)
    out, lse = gather("out"), gather("lse")
    assert out is not None and lse is not None
    return Results(out, lse, maxima[0], gather("dq"), gather("dk"), gather("dv"), dsink)
