"""Starts the other ranks of a model as processes, with gloo between them and this process as rank 0."""

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed import TCPStore

from engine.attention import TorchBackend
from engine.parallel import TorchRanks
from engine.parallel.loading import ModelFolder
from engine.parallel.worker import Worker
from engine.run.forward import ForwardPass
from tests.engine.triton_case import make_triton_backend

LOOPBACK = "127.0.0.1"
SECONDS = 60.0
_CONTENTS = b"contents"
_CPU = torch.device("cpu")
# A server imports torch once, and forks each rank.
FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(["tests.engine.parallel.other_ranks"])


class Sizes(NamedTuple):
    """Sizes of every rank's cache, and whether it is that of fused kernels."""

    block_size: int
    device_blocks: int
    host_blocks: int = 0
    fused: bool = False


class RankModel:
    """A rank's slice of a model in float32, with its cache and its decoder."""

    def __init__(self, folder: Path, ranks: TorchRanks, sizes: Sizes) -> None:
        self.ranks = ranks
        mine = ModelFolder(folder, ranks.size).load(ranks, torch.float32, _CPU)
        self.loaded = loaded = mine.loaded
        blocks, host_blocks = ranks.minimum(sizes.device_blocks), ranks.minimum(sizes.host_blocks)
        kind = partial(make_triton_backend(), dtype=torch.float32) if sizes.fused else TorchBackend
        self.backend = kind(loaded.geometry, sizes.block_size, blocks, host_blocks=host_blocks)
        self.decoder = mine.decoder(self.backend)


class OtherRanks:
    """The other ranks of this process, which is rank 0."""

    def __init__(self, mine: RankModel, connections: list[Connection]) -> None:
        self.mine = mine
        self._connections = connections

    def send(self, message: bytes) -> None:
        for connection in self._connections:
            connection.send_bytes(message)

    def contents(self, rank: int) -> torch.Tensor:
        """Return the cache of a rank, after the plans sent so far."""
        if rank == 0:
            return self.mine.backend.cache
        connection = self._connections[rank - 1]
        connection.send_bytes(_CONTENTS)
        numbers = torch.frombuffer(bytearray(connection.recv_bytes()), dtype=torch.float32)
        return numbers.view(self.mine.backend.cache.shape)


@contextmanager
def other_ranks(folder: Path, size: int, sizes: Sizes) -> Iterator[OtherRanks]:
    """Start `size` - 1 processes; they end with the context."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=SECONDS))
    pairs = [FORKING.Pipe() for _ in range(1, size)]
    processes = [
        FORKING.Process(target=run_rank, args=(folder, rank, size, store.port, theirs, sizes), daemon=True)
        for rank, (_, theirs) in enumerate(pairs, 1)
    ]
    for process, (_, theirs) in zip(processes, pairs, strict=True):
        process.start()
        theirs.close()
    ranks = TorchRanks(0, size, store, _CPU, SECONDS)
    try:
        yield OtherRanks(RankModel(folder, ranks, sizes), [ours for ours, _ in pairs])
    finally:
        for ours, _ in pairs:
            ours.close()
        for process in processes:
            process.join(SECONDS)
        ranks.close()
    assert [process.exitcode for process in processes] == [0] * len(processes)


def run_rank(folder: Path, rank: int, size: int, port: int, connection: Connection, sizes: Sizes) -> None:
    """Body of another rank's process: launch plans until the connection ends."""
    torch.set_num_threads(1)
    store = TCPStore(LOOPBACK, port, is_master=False, timeout=timedelta(seconds=SECONDS))
    mine = RankModel(folder, TorchRanks(rank, size, store, _CPU, SECONDS), sizes)
    forward = ForwardPass(mine.decoder, mine.backend, sizes.block_size, _CPU)

    def receive() -> bytes | None:
        try:
            while (message := connection.recv_bytes()) == _CONTENTS:
                connection.send_bytes(mine.backend.cache.numpy().tobytes())
        except EOFError:
            return None
        return message

    Worker(mine.ranks, forward, _CPU).run(receive)
    mine.ranks.close()
