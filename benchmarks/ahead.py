"""Compilation in advance: worker processes run calls once, and the measuring process reads the compilers' disk caches.

Compilation takes most of the time of a run. `run_ahead` returns before anything is timed. `Background` compiles peers
on some of the processors while rows without peers are measured.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any, TypeVar

K = TypeVar("K", bound=Hashable)


def run_ahead(
    tasks: Mapping[K, Callable[[], object]],
    *,
    workers: int,
    seconds: float,
    on_done: Callable[[K, BaseException | None], None] = lambda key, error: None,
) -> set[K]:
    """Run picklable tasks in worker processes, for at most `seconds`, and return the keys of those that succeeded.

    `on_done` is called with the key and the error of each task that ends. A task that fails is skipped, because the
    same call fails again when it is measured, and is noted there.
    """
    done: set[K] = set()
    if seconds <= 0 or not workers or not tasks:
        return done
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_limit_compile_threads)
    keys = {pool.submit(_run, task): key for key, task in tasks.items()}
    try:
        for future in as_completed(keys, timeout=seconds):
            error = future.exception()
            if error is None:
                done.add(keys[future])
            on_done(keys[future], error)
    except TimeoutError:
        pass  # the remaining kernels are compiled when they are measured
    processes = list(pool._processes.values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.terminate()
    for process in processes:
        process.join()
    return done


class Background:
    """Runs tasks in worker processes of low priority while this process continues.

    Args:
        tasks: Picklable tasks by key.
        workers: Number of processes.
        seconds: Time limit.
    """

    def __init__(self, tasks: Mapping[Any, Callable[[], object]], *, workers: int, seconds: float) -> None:
        self.done: set[Any] = set()  # keys of tasks that succeeded so far
        self.errors: dict[Any, BaseException] = {}  # of tasks that failed so far
        self._thread = threading.Thread(target=self._run, args=(tasks, workers, seconds), daemon=True)
        self._thread.start()

    def _run(self, tasks: Mapping[Any, Callable[[], object]], workers: int, seconds: float) -> None:
        run_ahead(tasks, workers=workers, seconds=seconds, on_done=self._add)

    def _add(self, key: Any, error: BaseException | None) -> None:
        if error is None:
            self.done.add(key)
        else:
            self.errors[key] = error

    def wait(self, seconds: float) -> None:
        """Wait until all tasks have ended, for at most `seconds`."""
        self._thread.join(max(0.0, min(seconds, threading.TIMEOUT_MAX)))


def _limit_compile_threads() -> None:
    """Run at low priority, and prevent torch's compiler from starting one process per core in each worker."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    os.nice(10)


def _run(task: Callable[[], object]) -> None:
    """Run a task in a worker and free the memory of the GPU, which all workers share."""
    import torch

    task()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
