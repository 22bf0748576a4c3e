"""Runs cases in processes of their own: simulations side by side, timed cases alone."""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from bench.papers.case import Case, Values

# Called with a case when it has ended: its values, or the exception that it raised.
OnEnd = Callable[[Case, Values | Exception], None]


def run_cases(cases: Sequence[Case], workers: int, on_end: OnEnd) -> None:
    """Run cases, each in a fresh process: first those that are not timed, `workers` at a time."""
    _run([case for case in cases if not case.timed], workers, on_end)
    _run([case for case in cases if case.timed], 1, on_end)


def _run(cases: Sequence[Case], workers: int, on_end: OnEnd) -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, workers), context, max_tasks_per_child=1) as executor:
        try:
            running = {executor.submit(_call, case): case for case in cases}
            for future in as_completed(running):
                failure = future.exception()
                if isinstance(failure, BaseException) and not isinstance(failure, Exception):
                    raise failure
                on_end(running[future], failure if isinstance(failure, Exception) else future.result())
        except BaseException:  # Ctrl-C, perhaps of this process alone: nobody would keep what the others compute
            executor.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                child.terminate()
            raise


def _call(case: Case) -> Values:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in the engine's process
    return case.run(**case.arguments)
