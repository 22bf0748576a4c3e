"""Prefix lookups at several KV managers: the services are real, the engines only their streams."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import pytest

import kvmanager
from bench.loads.decoding_batch import DecodingBatch, attach, round_trip
from quire.v1 import kvmanager_pb2
from services.gateway.fleet import prefix_lookup
from services.gateway.fleet.discovery import ServiceAddresses
from services.gateway.fleet.prefix_lookup import ManagerClient, PrefixLookup
from services.kvmanager.server import KVManagerService
from services.kvmanager.settings import KVManagerSettings
from services.runtime import transport
from services.runtime.errors import Unavailable
from services.wire.step import step_message
from tests.running_quire import CALL_SECONDS
from tests.services.gateway.handler_in_process import running_service

pytestmark = pytest.mark.anyio

FINGERPRINTS = {"a": "first", "b": "first", "c": "second"}
SALT = (1).to_bytes(8)  # of the first Step of a DecodingBatch
CACHED = 32


def tokens() -> "array[int]":
    """Return more than the cached tokens of the first sequence of a DecodingBatch."""
    allocate = next(DecodingBatch(2).steps(0)).allocates[0]
    return array("i", [*allocate.token_ids, 1])


@dataclass
class Managers:
    """KV managers by the engine that is attached to them, whose first sequence has cached blocks."""

    addresses: dict[str, str] = field(default_factory=dict)
    stacks: dict[str, AsyncExitStack] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    now: float = 0.0

    async def start(self, engine_id: str) -> None:
        stack = self.stacks[engine_id] = AsyncExitStack()
        service = KVManagerService(KVManagerSettings(listen="127.0.0.1:0", map_listen=""))
        address = self.addresses[engine_id] = await stack.enter_async_context(running_service(service))
        channel = await stack.enter_async_context(transport.channel(address))
        spec = kvmanager.PoolSpec(
            engine_id, 1, block_size=16, device_blocks=64, host_blocks=0, model_fingerprint=FINGERPRINTS[engine_id]
        )
        call = await attach(channel, spec)
        for step in DecodingBatch(2).steps(0):
            await round_trip(call, step_message(step))

    def lookup(self) -> PrefixLookup:
        return PrefixLookup(ServiceAddresses.of(",".join(self.addresses.values())), lambda: self.now)

    async def ask(self, lookup: PrefixLookup, engine_ids: Collection[str]) -> tuple[dict[str, int] | None, str]:
        """Return the answer, and the engines of the KV managers that were asked for it."""
        self.asked.clear()
        (fingerprint,) = {FINGERPRINTS.get(one, "first") for one in engine_ids}
        answer = await lookup.cached_tokens(tokens(), SALT, fingerprint, engine_ids)
        names = {address: name for name, address in self.addresses.items()}
        return answer, "".join(sorted(names[address] for address in self.asked))


@pytest.fixture
async def managers(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Managers]:
    found = Managers()
    actual = ManagerClient.cached_tokens

    async def noted(client: ManagerClient, request: kvmanager_pb2.LookupPrefixRequest) -> dict[str, int] | None:
        found.asked.append(client._address)
        return await actual(client, request)

    monkeypatch.setattr(ManagerClient, "cached_tokens", noted)
    monkeypatch.setattr(prefix_lookup, "_TIMEOUT_SECONDS", CALL_SECONDS)
    for engine_id in FINGERPRINTS:
        await found.start(engine_id)
    yield found
    for stack in found.stacks.values():
        await stack.aclose()


async def test_all_kv_managers_are_asked_for_unknown_engines_and_then_those_of_the_models_engines(
    managers: Managers,
) -> None:
    lookup = managers.lookup()
    assert await managers.ask(lookup, "ab") == ({"a": CACHED, "b": CACHED}, "abc")
    assert await managers.ask(lookup, "ab") == ({"a": CACHED, "b": CACHED}, "ab")
    assert await managers.ask(lookup, "b") == ({"b": CACHED}, "b")
    # Not with every request.
    assert await managers.ask(lookup, "c") == (None, "")
    managers.now = 1.0
    assert await managers.ask(lookup, "c") == ({"c": CACHED}, "abc")
    managers.now = 2.0
    assert await managers.ask(lookup, "c") == ({"c": CACHED}, "c")
    assert await managers.ask(lookup, ("a", "never attached")) == ({"a": CACHED, "b": CACHED}, "abc")
    assert await managers.ask(lookup, ("a", "never attached")) == ({"a": CACHED}, "a")
    await lookup.close()


async def test_engines_of_a_lost_kv_manager_are_missing_in_the_answer(managers: Managers) -> None:
    lookup = managers.lookup()
    await managers.ask(lookup, "ab")
    await managers.stacks.pop("a").aclose()
    assert await managers.ask(lookup, "ab") == ({"b": CACHED}, "ab")
    assert (await managers.ask(lookup, "a"))[0] is None
    await lookup.close()


async def test_a_single_kv_manager_is_asked_for_all_engines(managers: Managers) -> None:
    lookup = PrefixLookup(ServiceAddresses.of(managers.addresses["a"]), lambda: 0.0)
    for _ in range(2):
        assert await managers.ask(lookup, ("never attached",)) == ({"a": CACHED}, "a")
    await lookup.close()


async def test_the_blocks_of_a_request_come_from_the_kv_manager_that_has_it(managers: Managers) -> None:
    lookup = managers.lookup()
    (allocate, *_) = next(DecodingBatch(2).steps(0)).allocates
    known = await lookup.request_blocks(kvmanager_pb2.GetRequestBlocksRequest(request_id=allocate.request_id))
    assert known is not None
    assert known.sequences[0].block_count > CACHED // 16
    for engine_id in FINGERPRINTS:  # all have a request of this id
        await managers.ask(lookup, engine_id)
        managers.now += 1.0
        asked = kvmanager_pb2.GetRequestBlocksRequest(request_id=allocate.request_id, engine_id=engine_id)
        found = await lookup.request_blocks(asked)
        assert found is not None
        assert found.engine_id == engine_id
    unknown = kvmanager_pb2.GetRequestBlocksRequest(request_id="none")
    assert await lookup.request_blocks(unknown) is None
    await managers.stacks.pop("c").aclose()
    moved = await lookup.request_blocks(
        kvmanager_pb2.GetRequestBlocksRequest(request_id=allocate.request_id, engine_id="c")
    )
    assert moved is not None
    assert moved.engine_id in ("a", "b"), "a request moves to another engine when its own is lost"
    with pytest.raises(Unavailable, match="the KV manager does not answer"):
        await lookup.request_blocks(unknown)
    await lookup.close()


async def test_kv_managers_of_a_name_are_found_and_dropped_with_their_address(
    managers: Managers, monkeypatch: pytest.MonkeyPatch
) -> None:
    lookup = PrefixLookup(ServiceAddresses.of("dns:managers.local:1"), lambda: managers.now)
    found = asyncio.Event()

    async def watch(*_: object) -> AsyncIterator[dict[str, str]]:
        yield dict.fromkeys(managers.addresses.values(), "managers.local")
        found.set()
        await changed.wait()
        yield {managers.addresses["b"]: "managers.local"}
        found.set()

    changed = asyncio.Event()
    monkeypatch.setattr(prefix_lookup, "watch_addresses", watch)
    assert await managers.ask(lookup, "ab") == (None, "")
    running = asyncio.create_task(lookup.run(1.0))
    await found.wait()
    assert await managers.ask(lookup, "ab") == ({"a": CACHED, "b": CACHED}, "abc")
    found.clear()
    changed.set()
    await running
    assert await managers.ask(lookup, "ab") == ({"b": CACHED}, "b")
    await lookup.close()
