"""Whoever follows an engine's KV events ends with the KV manager's index, whatever was lost on the way.

10,000 random requests in a small pool with a host tier, with resets, evictions, swaps, and kills of engine, KV manager
and listeners. Three consumers, ours, vLLM's and Dynamo's, lose 5 % of the batches; one joins late, each is stopped for
ten seconds. At the end each knows exactly the blocks that prompts can reach.
"""

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bench.loads.http_server import free_address
from quire.v1 import gateway_pb2, gateway_pb2_grpc, kvmanager_pb2, kvmanager_pb2_grpc, pins_pb2
from services.engine.events.zeromq.vllm_format import wire_hash
from tests.acceptance.conftest import Record
from tests.acceptance.event_consumers import (
    AskedConsumer,
    Consumer,
    DynamoIndex,
    Held,
    OwnIndex,
    VllmIndex,
    needs_vllm,
    until,
)
from tests.acceptance.lossy_events import LossyEvents
from tests.acceptance.random_prefixes import PrefixRequest, prefix_request, reachable, run
from tests.running.listed_kvmanager import FOLDER, LINE
from tests.running_quire import CALL_SECONDS, RunningService
from tests.scrape import Scrape

REQUESTS = int(os.environ.get("QUIRE_EVENT_REQUESTS", "10000"))
SEED = 11
LOSS = 0.05
STOPPED_SECONDS = 10.0
CONCURRENCY = 32
_CATCH_UP_SECONDS = 60
_POOL = ("--device-blocks", "180", "--host-blocks", "160", "--preemption", "swap", "--max-sequences", "32")
_PACE = ("--microseconds-per-step", "400", "--microseconds-per-token", "1", "--heartbeat-seconds", "0.5")


class Totals(NamedTuple):
    """What the pools of the run did."""

    evicted: int
    to_host: int
    to_device: int


class Cluster:
    """A KV manager that lists its keys, an engine without a model that publishes events, and a gateway."""

    def __init__(self, stack: ExitStack, folder: Path, model: Path, events: str, replay: str) -> None:
        self.events, self.replay = events, replay
        self._stack, self._folder, self._model = stack, folder, model
        os.environ[FOLDER] = str(folder)
        self.totals: list[Totals] = []
        self.swapped_tokens = 0
        self.kvmanager = self._manager()
        self.engine = self._engine()
        addresses = ("--engines", self.engine.address, "--kvmanager", self.kvmanager.address)
        self.gateway = self._start("gateway", "gateway", *addresses)
        self.gateway.output.wait_for("gateway is ready")
        self.stub = gateway_pb2_grpc.GatewayStub(self.gateway.channel)

    def kill_manager(self) -> None:
        self.note_totals()
        self.kvmanager.kill()
        self.kvmanager = self._manager()

    def kill_engine(self) -> None:
        self.note_totals()
        self.note_swaps()
        self.engine.kill()
        self.engine = self._engine()

    def reset(self) -> None:
        """Forget all prefixes."""
        request = gateway_pb2.AdminRequest(reset_prefix_cache=pins_pb2.ResetPrefixCache())
        self.stub.Admin(request, timeout=CALL_SECONDS)

    def note_totals(self) -> None:
        """Record what the pool has done since it was attached."""
        until(self.is_attached, "the pool is attached")
        one = self.pool().totals
        self.totals.append(Totals(one.evicted_blocks, one.to_host_blocks, one.to_device_blocks))

    def note_swaps(self) -> None:
        """Count the tokens that preemptions moved to the host tier since the engine started."""
        self.swapped_tokens += int(Scrape.of(self.engine.metrics_url).value("quire_swapped_tokens_total"))

    def pool(self) -> kvmanager_pb2.PoolInfo:
        stub = kvmanager_pb2_grpc.KVManagerStub(self.kvmanager.channel)
        return stub.GetPool(kvmanager_pb2.GetPoolRequest(), timeout=CALL_SECONDS).pool

    def is_attached(self) -> bool:
        stub = kvmanager_pb2_grpc.KVManagerStub(self.kvmanager.channel)
        return bool(stub.ListPools(kvmanager_pb2.ListPoolsRequest(), timeout=CALL_SECONDS).pools)

    def listed(self) -> dict[str, Any]:
        """Return the keys of the pool as the KV manager has them. See tests/running/listed_kvmanager.py."""
        until(lambda: self.pool().sequences == 0, "all sequences are freed")
        before = len(self.kvmanager.output.lines)
        self.kvmanager.process.send_signal(signal.SIGUSR1)
        file = Path(self.kvmanager.output.wait_for(LINE, after=before).split(LINE)[1])
        pools: dict[str, Any] = json.loads(file.read_text())
        (pool,) = pools.values()
        return dict(pool)

    def _manager(self) -> RunningService:
        module = "tests.running.listed_kvmanager"
        return self._start("kvmanager", "kvmanager", "--lease-seconds", "60", command=module)

    def _engine(self) -> RunningService:
        options = ("--kvmanager", self.kvmanager.address, "--model", str(self._model), "--engine-id", "e0")
        events = ("--kv-events-listen", self.events, "--kv-events-replay-listen", self.replay)
        history = ("--kv-events-history", "256")  # so that snapshots are needed
        parts = (*options, *events, *history, *_POOL, *_PACE)
        engine = self._start("engine", "engine", *parts, command="bench.loads.null_engine")
        engine.output.wait_for("engine is ready")
        return engine

    def _start(self, label: str, name: str, *arguments: str, command: str = "") -> RunningService:
        listen = ("--listen", f"unix:{self._folder}/{name}.sock", *arguments)
        if command.startswith("tests."):
            listen = (label, *listen)
        one = RunningService(label, *listen, module=command)
        self._stack.callback(lambda: one.close() if one.process.poll() is None else 0)
        return one


@pytest.fixture
def cluster(tmp_path: Path, demo_model: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(stack, tmp_path, demo_model, free_address(), free_address())


class Followers:
    """The consumers, each behind a publisher that loses batches."""

    def __init__(self, stack: ExitStack, cluster: Cluster) -> None:
        self._stack, self._cluster = stack, cluster
        self.consumers: dict[str, Consumer] = {}
        self.lossy: list[LossyEvents] = []

    def start(self, name: str, kind: Callable[[str, str], Consumer]) -> None:
        """Start a consumer, in place of one of the same name."""
        if name in self.consumers:
            self.consumers.pop(name).close()
        lossy = LossyEvents(self._cluster.events, LOSS, SEED + len(self.lossy))
        self._stack.callback(lossy.close)
        self.lossy.append(lossy)
        self.consumers[name] = kind(f"tcp://{lossy.address}", f"tcp://{self._cluster.replay}")

    def pause(self, name: str) -> None:
        """Stop a consumer for some seconds, in which requests go on."""
        self.consumers[name].stop()
        time.sleep(STOPPED_SECONDS)
        self.consumers[name].resume()

    def close(self) -> None:
        for one in self.consumers.values():
            one.close()


def dynamo(pub: str, replay: str) -> Consumer:
    return DynamoIndex(pub, replay, block_size=16)


@needs_vllm
def test_all_consumers_end_with_the_managers_index(cluster: Cluster, record: Record) -> None:
    requests = [prefix_request(number, SEED) for number in range(REQUESTS)]
    with ExitStack() as stack:
        followers = Followers(stack, cluster)
        stack.callback(followers.close)
        for name, kind in (("own", OwnIndex), ("vllm", VllmIndex), ("dynamo", dynamo)):
            followers.start(name, kind)
        outcomes = run_with(acts(cluster, followers), cluster, requests)
        cluster.note_totals()
        cluster.note_swaps()
        expected = expected_blocks(cluster, requests)
        differences = {name: difference(one, expected) for name, one in followers.consumers.items()}
        lost = sum(one.lost for one in followers.lossy)
        states = {name: counts_of(one) for name, one in followers.consumers.items()}
    totals = Totals(*map(sum, zip(*cluster.totals, strict=True)))
    swapped = cluster.swapped_tokens
    record(blocks=len(expected), lost=lost, outcomes=outcomes, swapped_tokens=swapped, **totals._asdict(), **states)
    assert {name: len(one) for name, one in differences.items()} == dict.fromkeys(followers.consumers, 0), differences
    assert min(*totals, swapped) > 0, f"the run did too little: {totals}, {swapped} swapped tokens"
    assert min(len(expected), lost, outcomes["OK"], outcomes["DEADLINE_EXCEEDED"]) > 0


def acts(cluster: Cluster, followers: Followers) -> list[Callable[[], None]]:
    """Return what happens during a run, in order."""
    return [
        cluster.reset,
        cluster.kill_manager,
        lambda: followers.pause("vllm"),
        lambda: followers.start("own", OwnIndex),
        cluster.kill_engine,
        lambda: followers.pause("dynamo"),
        cluster.reset,
        lambda: followers.start("late", OwnIndex),
        lambda: followers.pause("own"),
        cluster.kill_manager,
        cluster.kill_engine,
        lambda: followers.start("vllm", VllmIndex),
        cluster.reset,
        cluster.kill_manager,
    ]


def run_with(acts: list[Callable[[], None]], cluster: Cluster, requests: list[PrefixRequest]) -> Counter[str]:
    """Run requests in equal parts: a first one, one during each act, and a last one."""
    outcomes: Counter[str] = Counter()
    size = -(-len(requests) // (len(acts) + 2))
    with ThreadPoolExecutor(1) as side:
        for number, act in enumerate([lambda: None, *acts, lambda: None]):
            acting = side.submit(act)
            outcomes += run(cluster.stub, requests[number * size : (number + 1) * size], CONCURRENCY)
            acting.result()
    return outcomes


def expected_blocks(cluster: Cluster, requests: list[PrefixRequest]) -> set[Held]:
    """Return the blocks that prompts can reach, from the KV manager's own index."""
    pool = cluster.listed()
    present = {tier: {bytes.fromhex(key) for key in keys} for tier, keys in pool["kinds"][0].items()}
    found = reachable(requests, pool["fingerprint"], pool["resets"], present)
    return {Held(wire_hash(key), tier) for tier, keys in found.items() for key in keys}


def difference(consumer: Consumer, expected: set[Held]) -> list[Held]:
    """Return the blocks that differ after the consumer had time to catch up; empty if there are none."""
    deadline = time.monotonic() + _CATCH_UP_SECONDS
    while (differing := consumer.held() ^ expected) and time.monotonic() < deadline:
        time.sleep(0.2)
    return sorted(differing)


def counts_of(consumer: Consumer) -> dict[str, int]:
    """Return what a consumer counted."""
    if isinstance(consumer, DynamoIndex):
        return {"warnings": len(consumer.warnings())}
    assert isinstance(consumer, AskedConsumer)
    return {name: value for name, value in consumer.state().items() if name not in ("blocks", "last")}
