"""The process of a rank other than 0: a child of rank 0 on the same machine, or started by torchrun."""

import json
import logging
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from typing import Any

# Before torch is imported, see services.cli.commands.services.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from engine.errors import RankFailed
from engine.parallel.ranks import is_collectives
from engine.parallel.worker import Worker
from engine.run.forward import ForwardPass
from services.engine.ranks.link import Kind, Message, RankLink
from services.engine.ranks.meeting import connect, meet
from services.engine.ranks.placement import LOOPBACK, Placement
from services.engine.ranks.rank_slice import SECONDS_TO_LOAD, SliceLoader
from services.engine.settings import EngineSettings
from services.runtime.logs.records import logging_to_stderr

# What a machine has of its own; all other settings are those of rank 0.
_OF_MACHINE = ("model", "kernels_folder", "device", "threads", "log_format", "log_level")

_SECONDS_TO_REPORT = 60.0  # for rank 0 to start, to which a failure is reported

log = logging.getLogger("quire.engine")


def main() -> None:
    """Run a child of rank 0 until rank 0 ends. The argument is the file descriptor of the socket to rank 0."""
    link = RankLink(socket.socket(fileno=int(sys.argv[1])), "rank 0")
    start = link.receive()
    if start is None:
        return
    given = json.loads(start.body)
    settings, rank, port = EngineSettings(**given["settings"]), int(given["rank"]), int(given["port"])
    with logging_to_stderr(f"rank {rank}", settings.log_format, settings.log_level):
        seconds = timedelta(seconds=SECONDS_TO_LOAD)
        store = partial(TCPStore, LOOPBACK, port, is_master=False, timeout=seconds)
        sys.exit(_run(link, store, settings, Placement.local(rank, settings.tensor_parallel, port)))


def run_rank(
    settings: EngineSettings, place: Placement, with_folder: Callable[[EngineSettings], EngineSettings]
) -> int:
    """Run a rank that torchrun has started, until rank 0 ends, and return the exit status; a failure is logged.

    Of the settings, those that do not belong to this machine are replaced by rank 0's. `with_folder` returns them with
    the model's folder.
    """
    with logging_to_stderr(f"rank {place.rank}", settings.log_format, settings.log_level):
        try:
            own = with_folder(settings)
        except KeyboardInterrupt:
            return 0
        except Exception as error:
            log.error("rank %d failed: %s", place.rank, _line(error))
            _report(place, _line(error))
            return 1
        try:
            store = meet(place)
            link = connect(place, store)
            ours = _shared(_started(link, place), own, link)
        except KeyboardInterrupt:
            return 0
        except Exception as error:
            log.error("rank %d failed: %s", place.rank, _line(error))
            return 1
        # torchrun ends all processes of a machine, but running requests end first.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        return _run(link, lambda: store, ours, place)


def _report(place: Placement, reason: str) -> None:
    """Report a failure to rank 0, which would wait for this rank."""
    with suppress(RankFailed), closing(connect(place, meet(place, _SECONDS_TO_REPORT))) as link:
        _started(link, place)  # rank 0 may never start
        link.send(Kind.FAILED, reason.encode())


def _started(link: RankLink, place: Placement) -> Message:
    start = link.receive()
    if start is None:
        raise RankFailed(f"rank 0 has ended, or has another rank {place.rank}")
    return start


def _shared(start: Message, own: EngineSettings, link: RankLink) -> EngineSettings:
    """Return rank 0's settings, with those that a machine has of its own."""
    settings: dict[str, Any] = json.loads(start.body)["settings"]
    if settings.keys() != asdict(own).keys():
        fault = "rank 0 runs another version of Quire"
        with closing(link):
            link.send(Kind.FAILED, fault.encode())
        raise RankFailed(fault)
    return replace(EngineSettings(**settings), **{name: getattr(own, name) for name in _OF_MACHINE})


def _run(link: RankLink, store: Callable[[], Store], settings: EngineSettings, place: Placement) -> int:
    """Run a rank, and return 1 if it failed; at the end of rank 0 the process ends."""
    try:
        messages = _receive(link, settings.rank_seconds)
        loader = SliceLoader(settings, place)
        link.send(Kind.READY, json.dumps(loader.identity).encode())
        messages.get()
        mine = loader.connect(store())
        link.send(Kind.READY)
        forward = ForwardPass(mine.decoder, mine.backend, settings.block_size, loader.device)
        worker = Worker(mine.ranks, forward, loader.device)
        worker.run(messages.get, lambda: link.send(Kind.LAUNCHED))
    except Exception as error:
        reason = _line(error)
        log.error("rank %d failed: %s", place.rank, reason)
        with suppress(RankFailed):  # rank 0 may have ended
            link.send(Kind.LOST if is_collectives(error) else Kind.FAILED, reason.encode())
        return 1
    return 0


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).split("\n", 1)[0]


def _receive(link: RankLink, seconds: float) -> "queue.SimpleQueue[bytes]":
    """Receive messages on a thread, because a rank that computes must notice the end of rank 0.

    Returns the bodies of those that the main thread waits for.
    """
    bodies: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def receive() -> None:
        try:
            while (message := link.receive()) is not None:
                if message.kind is Kind.HEARTBEAT:
                    link.limit_receiving(seconds)  # rank 0 sends them until the engine ends
                    link.send(Kind.ALIVE)
                else:
                    bodies.put(message.body)
        except RankFailed as failure:
            log.error("%s", failure)
            os._exit(1)
        # The main thread may wait for rank 0 in a collective, which nothing else ends.
        os._exit(0)

    threading.Thread(target=receive, name="messages", daemon=True).start()
    return bodies


if __name__ == "__main__":
    main()
