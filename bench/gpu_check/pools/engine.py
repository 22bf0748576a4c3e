"""An engine over a runner: with a KV manager in another process, or else with its core in this one."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from bench.gpu_check.cases import BLOCK_SIZE
from bench.gpu_check.llama_engine import TimedRunner
from bench.gpu_check.notes import Notes
from bench.gpu_check.pools.in_process import Connection, in_process
from engine.model.loaded import LoadedModel
from engine.run.loop import Engine
from engine.schedule.capacity import Capacity
from engine.schedule.limits import Limits
from engine.schedule.scheduler import Scheduler
from kvmanager import PoolSpec

IN_PROCESS = "KV manager in the same process"


@dataclass(frozen=True)
class Pools:
    """Makes engines with an empty pool each. `connect` makes the pool; `peer` names it in rows where it matters."""

    connect: Callable[[PoolSpec], AbstractContextManager[Connection]]
    peer: str | None

    @contextmanager
    def engine(
        self, runner: TimedRunner, loaded: LoadedModel, blocks: int, token_budget: int, sequences: int
    ) -> Iterator[tuple[Engine, Callable[[bool], None]]]:
        """Yield an engine, and a function that waits for the KV manager after a turn without progress."""
        capacity = Capacity(loaded.context_tokens, loaded.vocabulary_size, BLOCK_SIZE, blocks)
        limits = Limits(max(token_budget, sequences), sequences)
        scheduler = Scheduler(capacity, limits, ahead=True, counts_tokens=True)
        with self.connect(PoolSpec("gpu-check", 1, loaded.fingerprint, BLOCK_SIZE, blocks)) as (link, wait):
            yield Engine(scheduler, runner, link, time.monotonic), wait


def pools(notes: Notes) -> Pools:
    """Try to reach a KV manager in another process, for which the installed gRPC may be too old; write what was chosen.

    With the core in the same process, the host's time includes the manager's instead of the messages to it.
    """
    try:
        from bench.gpu_check.pools.attached import attached

        with attached(PoolSpec("gpu-check", 1, "trial", BLOCK_SIZE, 1)):
            pass
    # Generated code checks versions by errors of several types.
    except Exception as failure:
        reason = f"{type(failure).__name__}: {failure}"
        print(f"{IN_PROCESS}: {reason}", flush=True)
        notes.raw("kv_manager", {"where": IN_PROCESS, "reason": reason})
        return Pools(in_process, IN_PROCESS)
    notes.raw("kv_manager", {"where": "another process"})
    return Pools(attached, None)
