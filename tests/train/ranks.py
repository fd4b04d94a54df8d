"""Runs a function on several processes that find each other as under torchrun, and never waits for ever."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch.distributed import TCPStore

TIMEOUT = 120.0


def on_ranks(processes: int, function: Callable[..., Any], *arguments: Any, timeout: float = TIMEOUT) -> list[Any]:
    """What a function (of a module, by name) returns on each process, by rank; raises what any of them raised.

    The store that they meet in is here, on a port that was free: nothing else can take it before they come.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout))
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(processes),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": "1",
    }
    context = multiprocessing.get_context("spawn")
    started, answers = [], {}
    for rank in range(processes):
        answer, child = context.Pipe(duplex=False)
        own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = context.Process(target=_run, args=(child, own, function, arguments), daemon=True)
        process.start()
        child.close()
        started.append(process)
        answers[answer] = rank
    try:
        found = _collect(answers, processes, time.monotonic() + timeout)
        for process in started:
            process.join(10)
        return found
    finally:
        for process in started:
            process.kill()
            process.join()
        for answer in answers:
            answer.close()


def _collect(answers: dict[Connection, int], processes: int, deadline: float) -> list[Any]:
    found: dict[int, Any] = {}
    while len(found) < processes:
        ready = wait([answer for answer, rank in answers.items() if rank not in found], deadline - time.monotonic())
        if not ready:
            raise TimeoutError(f"ranks {sorted(set(range(processes)) - set(found))} did not answer in time")
        for answer in ready:
            assert isinstance(answer, Connection)
            try:
                error, found[answers[answer]] = pickle.loads(answer.recv_bytes())
            except EOFError:
                raise RuntimeError(f"rank {answers[answer]} died") from None
            if error is not None:
                raise RuntimeError(f"rank {answers[answer]}:\n{error}")
    return [found[rank] for rank in range(processes)]


def _run(answer: Connection, environment: dict[str, str], function: Callable[..., Any], arguments: Any) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        result = function(*arguments)
    except BaseException:
        answer.send_bytes(pickle.dumps((traceback.format_exc(), None)))
        return
    answer.send_bytes(pickle.dumps((None, result)))  # in bytes: tensors in shared memory would go with this process
