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

from torch.distributed import TCPStore

from engine.errors import RankFailed
from engine.parallel.worker import Worker
from engine.run.forward import ForwardPass
from services.engine.ranks.link import Kind, RankLink
from services.engine.ranks.rank_slice import LOOPBACK, START_SECONDS, RankSlice, SliceLoader
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
            reason = str(error).strip() or type(error).__name__
            log.error("rank %d failed: %s", rank, reason)
            link.send(Kind.FAILED, reason.encode())
            sys.exit(1)


def _run(link: RankLink, settings: EngineSettings, rank: int) -> None:
    loader = SliceLoader(settings, rank)
    link.send(Kind.READY)
    connect = link.receive()
    if connect is None:
        return
    store = TCPStore(LOOPBACK, int(connect.body), is_master=False, timeout=timedelta(seconds=START_SECONDS))
    mine = loader.connect(store)
    plans = _receive_plans(link, settings.rank_seconds)
    link.send(Kind.READY)
    forward = ForwardPass(mine.decoder, mine.backend, settings.block_size, mine.loaded.device)
    worker = Worker(mine.ranks, forward, mine.loaded.device)
    worker.run(plans.get, lambda: link.send(Kind.LAUNCHED))


def _receive_plans(link: RankLink, seconds: float) -> "queue.SimpleQueue[bytes]":
    """Receive messages on a thread, because a rank that computes must notice the end of rank 0."""
    plans: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def receive() -> None:
        try:
            while (message := link.receive()) is not None:
                if message.kind is Kind.PLAN:
                    plans.put(message.body)
                else:
                    link.send(Kind.ALIVE)
        except RankFailed as failure:
            log.error("%s", failure)
            os._exit(1)
        # The main thread may wait for rank 0 in a collective, which nothing else ends.
        os._exit(0)

    link.limit(seconds)
    threading.Thread(target=receive, name="plans", daemon=True).start()
    return plans


if __name__ == "__main__":
    main()
