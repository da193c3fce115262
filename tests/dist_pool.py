"""Ranks for tests: forked from the test process, so that torch and Megatron are imported once.

``run_ranks(4, function, ...)`` runs ``function(launch, ...)`` on four ranks and returns their
results in rank order. A rank that raises ends all of them, and its traceback is the test's failure.
"""

import contextlib
import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hp_muon_plugin.train.setup import Launch

_FORK = multiprocessing.get_context("fork")


class RankError(AssertionError):
    """A rank failed; the message holds its traceback."""


def run_ranks(world_size: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 90.0) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        workers = []
        for rank in range(world_size):
            receiver, sender = _FORK.Pipe(duplex=False)
            launch = Launch(rank, world_size, rank, f"file://{store}")
            process = _FORK.Process(target=_rank, args=(sender, function, launch, arguments))
            process.start()
            sender.close()
            workers.append((process, receiver))
        try:
            return _collect(workers, timeout_s)
        finally:
            for process, receiver in workers:
                process.kill()
                process.join()
                with contextlib.suppress(ProcessLookupError):  # what the rank had started, as Megatron's writers
                    os.killpg(process.pid, signal.SIGKILL)
                receiver.close()


def joined(launch: Launch, *, timeout_s: float = 30.0) -> None:
    """Join a plain gloo job without Megatron."""
    dist.init_process_group(
        "gloo",
        init_method=launch.init_method,
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timedelta(seconds=timeout_s),
    )


def _rank(sender: Any, function: Callable[..., Any], launch: Launch, arguments: tuple[Any, ...]) -> None:
    os.setpgid(0, 0)
    gc.freeze()  # what is collected is looked at, and memory that is looked at is copied
    torch.set_num_threads(1)
    try:
        answer = (True, pickle.dumps(function(launch, *arguments)))
    except BaseException as error:
        answer = (False, f"rank {launch.rank}: {type(error).__name__}: {error}\n{traceback.format_exc()}")
    sender.send(answer)
    sender.close()
    os._exit(0)


def _collect(workers: list[Any], timeout_s: float) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    waiting = {receiver: rank for rank, (_, receiver) in enumerate(workers)}
    while waiting:
        ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(f"ranks {sorted(waiting.values())} did not end within {timeout_s} s")
        for receiver in ready:
            rank = waiting.pop(receiver)
            try:
                succeeded, payload = receiver.recv()
            except EOFError:
                raise RankError(f"rank {rank} died without a word") from None
            if not succeeded:
                raise RankError(payload)
            results[rank] = pickle.loads(payload)
    return [results[rank] for rank in range(len(workers))]
