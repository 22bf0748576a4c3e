"""The process of a rank other than 0. Its argument is the file descriptor of its socket to rank 0."""

import json
import logging
import os
import queue
import socket
import sys
import threading
from datetime import timedelta

# Before torch is imported, see services.cli.commands.services.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from engine.errors import RankFailed
from engine.parallel.ranks import is_collectives
from engine.parallel.worker import Worker
from engine.run.forward import ForwardPass
from services.engine.ranks.link import Kind, RankLink
from services.engine.ranks.rank_slice import LOOPBACK, START_SECONDS, SliceLoader
from services.engine.settings import EngineSettings
from services.runtime.logs import logging_to_stderr

log = logging.getLogger("quire.engine")


def main() -> None:
    """Run a rank until rank 0 ends, and exit with 1 if this rank failed."""
    link = RankLink(socket.socket(fileno=int(sys.argv[1])), "rank 0")
    start = link.receive()
    if start is None:
        return
    given = json.loads(start.body)
    settings, rank = EngineSettings(**given["settings"]), int(given["rank"])
    with logging_to_stderr(f"rank {rank}", settings.log_format, settings.log_level):
        try:
            _run(link, settings, rank)
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).split("\n", 1)[0]
            log.error("rank %d failed: %s", rank, reason)
            link.send(Kind.LOST if is_collectives(error) else Kind.FAILED, reason.encode())
            sys.exit(1)


def _run(link: RankLink, settings: EngineSettings, rank: int) -> None:
    messages = _receive(link, settings.rank_seconds)
    loader = SliceLoader(settings, rank)
    link.send(Kind.READY)
    port = int(messages.get())
    store = TCPStore(LOOPBACK, port, is_master=False, timeout=timedelta(seconds=START_SECONDS))
    mine = loader.connect(store)
    link.send(Kind.READY)
    forward = ForwardPass(mine.decoder, mine.backend, settings.block_size, loader.device)
    worker = Worker(mine.ranks, forward, loader.device)
    worker.run(messages.get, lambda: link.send(Kind.LAUNCHED))


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
