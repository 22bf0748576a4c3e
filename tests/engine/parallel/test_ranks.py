"""The contract of Ranks: one rank alone, and gloo between processes."""

from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection

import pytest
import torch
from torch.distributed import TCPStore

from engine.parallel import OneRank, Ranks, TorchRanks
from tests.engine.parallel.other_ranks import FORKING, LOOPBACK, SECONDS

CPU = torch.device("cpu")
Results = dict[str, object]


def use(ranks: Ranks) -> Results:
    """Call every method once; return the results."""
    mine = torch.arange(4.0).view(2, 2) + 10 * ranks.rank
    return {
        "reduced": ranks.all_reduce(mine.clone()).tolist(),
        "gathered": ranks.gather(mine).tolist(),
        "gathered by all": ranks.all_gather(mine).tolist(),
        "in 16 bits": ranks.all_reduce(mine.bfloat16()).tolist(),
        "broadcast": ranks.broadcast(torch.tensor([ranks.rank, 7])).tolist(),
        "bytes": ranks.broadcast_bytes(bytes([ranks.rank, 200])),
        "no bytes": ranks.broadcast_bytes(b"x" * ranks.rank),
        "minimum": ranks.minimum(5 - ranks.rank),
    }


def test_one_rank_has_its_own_values() -> None:
    mine = [[0.0, 1.0], [2.0, 3.0]]
    assert use(OneRank()) == {
        "reduced": mine,
        "gathered": [mine],
        "gathered by all": [mine],
        "in 16 bits": mine,
        "broadcast": [0, 7],
        "bytes": b"\0\xc8",
        "no bytes": b"",
        "minimum": 5,
    }


@pytest.mark.parametrize("size", [2, 3])
def test_processes_exchange_their_values(size: int, gloo: Callable[[int], list[Results]]) -> None:
    results = gloo(size)
    own = [[[0.0 + 10 * rank, 1.0 + 10 * rank], [2.0 + 10 * rank, 3.0 + 10 * rank]] for rank in range(size)]
    summed = torch.tensor(own).sum(dim=0).tolist()
    for rank, result in enumerate(results):
        assert result["reduced"] == summed
        assert result["in 16 bits"] == summed
        assert result["gathered"] == ([own[rank]] if rank else own)
        assert result["gathered by all"] == own
        assert result["broadcast"] == [0, 7]
        assert result["bytes"] == b"\0\xc8"
        assert result["no bytes"] == b""
        assert result["minimum"] == 5 - (size - 1)


@pytest.fixture
def gloo(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[Results]]:
    """Runs `use` in as many processes, and returns their results in the order of ranks."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    def run(size: int) -> list[Results]:
        store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=SECONDS))
        ends = [FORKING.Pipe(duplex=False) for _ in range(size)]
        processes = [
            FORKING.Process(target=in_process, args=(rank, size, store.port, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(ends)
        ]
        for process in processes:
            process.start()
        results = [ours.recv() for ours, _ in ends]
        for process in processes:
            process.join(SECONDS)
        return results

    return run


def in_process(rank: int, size: int, port: int, results: Connection) -> None:
    """Body of a rank's process."""
    store = TCPStore(LOOPBACK, port, is_master=False, timeout=timedelta(seconds=SECONDS))
    ranks = TorchRanks(rank, size, store, CPU, SECONDS)
    results.send(use(ranks))
    ranks.close()
