"""A running engine that serves smg."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("smg_grpc_proto")

from tests.running_quire import RunningQuire, open_channel, start_quire
from tests.services.engine.smg.client import SmgClient


@pytest.fixture(scope="package")
def smg_quire(tiny_model: Callable[[str], Path]) -> Iterator[RunningQuire]:
    """A tiny Llama and 64 blocks of 16 tokens."""
    pool = ("--device-blocks", "64", "--max-sequences", "16", "--heartbeat-seconds", "0.2")
    one = start_quire("--model", str(tiny_model("llama")), *pool, "--smg")
    yield one
    assert one.settled_pool().sequences == 0
    assert one.close() == 0


@pytest.fixture
def smg(smg_quire: RunningQuire) -> Iterator[SmgClient]:
    """A client of it. Its calls must leave no blocks."""
    with open_channel(smg_quire.addresses["engine"]) as channel:
        yield SmgClient(channel)
    pool = smg_quire.settled_pool()
    assert (pool.sequences, pool.device.held) == (0, 0)
