"""KV events over real sockets on loopback: listeners, replays, snapshots, and clients that do not read."""

import asyncio
import time
from typing import Any

import msgspec
import psutil
import pytest
import zmq
import zmq.asyncio

from services.engine.events.changes import Cleared
from services.engine.events.zeromq import connections
from services.engine.events.zeromq.follower import HeldBlocks
from services.engine.events.zeromq.listener import Publication
from services.engine.events.zeromq.publisher import EventPublisher
from services.engine.events.zeromq.replay import Replays, parse_request, sequence_bytes
from services.engine.events.zeromq.vllm_format import AllBlocksCleared, BlockStored, decode
from services.engine.settings import EngineSettings
from services.runtime.transport import AddressUnavailable
from tests.key_changes import BLOCK_SIZE, stored
from tests.services.engine.events.publication import (
    ANY,
    EPOCH,
    SECONDS,
    ask,
    dealing,
    listening,
    published,
    settle,
    until,
)

pytestmark = pytest.mark.anyio


async def test_a_message_has_topic_number_and_payload() -> None:
    async with published(kv_events_topic="kv@pod-1@tiny") as one:
        with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as socket:
            socket.linger = 0
            socket.subscribe("kv@")
            socket.connect(f"tcp://{one.publisher.address}")
            receiving = asyncio.ensure_future(socket.recv_multipart())
            while not receiving.done():  # until the subscription has arrived
                one.stream.publish([stored(0, 1)])
                await asyncio.sleep(0.01)
            topic, number, payload = receiving.result()
    assert topic == b"kv@pod-1@tiny"
    assert EPOCH <= int.from_bytes(number, "big") < one.stream.next_sequence
    assert isinstance(decode(payload)[0], BlockStored)


@pytest.mark.parametrize("form", ["map", "array"])
async def test_a_late_listener_has_the_publishers_blocks(form: str) -> None:
    async with published(kv_events_form=form) as one:
        for _ in range(300):
            one.keys.change()
        async with listening(one.publication) as listener:
            await until(listener.complete.is_set)
            assert listener.follower.held.places == one.keys.state()
            for _ in range(300):
                one.keys.change()
                await asyncio.sleep(0)
            await settle(one, listener)
            assert listener.follower.held.counts() == one.keys.counts()
            assert listener.description is not None
            assert (listener.description.engine_id, listener.description.form) == ("engine-1", form)
            assert (listener.description.block_size, listener.description.epoch) == (BLOCK_SIZE, EPOCH)
            assert listener.follower.lost == 0


async def test_a_listener_that_loses_messages_asks_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    async with published() as one, listening(one.publication) as listener:
        await until(listener.complete.is_set)
        receive, count = listener._receive, 0

        async def lossy(context: zmq.asyncio.Context, frames: list[bytes]) -> None:
            nonlocal count
            count += 1
            if count % 20:
                await receive(context, frames)

        monkeypatch.setattr(listener, "_receive", lossy)
        while not count:  # until the subscription has arrived
            one.stream.publish([])
            await asyncio.sleep(0.01)
        for _ in range(400):
            before = count
            one.keys.change()
            await until(lambda: count > before, 0)  # noqa: B023
        await settle(one, listener)
        assert listener.follower.held.counts() == one.keys.counts()
        assert one.outcomes()["replayed"] >= 19
        assert listener.follower.lost == 0


async def test_a_listener_outlives_the_engine() -> None:
    async with published() as first:
        for _ in range(50):
            first.keys.change()
        address, replay = first.publisher.address, first.publisher.replay_address
        async with listening(first.publication) as listener:
            await until(listener.complete.is_set)
            await first.publisher.close()
            addresses = {"kv_events_listen": address, "kv_events_replay_listen": replay}
            async with published(EPOCH + (1 << 30), 7, **addresses) as second:
                for _ in range(50):
                    second.keys.change()
                await settle(second, listener)
                assert listener.follower.held.counts() == second.keys.counts()
                assert second.outcomes() == {"snapshot": 1}


async def test_a_listener_notices_another_process_with_the_same_numbers() -> None:
    async with published(0) as first:
        for _ in range(50):
            first.keys.change()
        address, replay = first.publisher.address, first.publisher.replay_address
        async with listening(first.publication) as listener:
            await until(listener.complete.is_set)
            await first.publisher.close()
            addresses = {"kv_events_listen": address, "kv_events_replay_listen": replay}
            async with published(0, 7, **addresses) as second:
                while second.stream.next_sequence < first.stream.next_sequence + 5:
                    second.keys.change()
                await settle(second, listener)
                assert listener.follower.held.counts() == second.keys.counts()


@pytest.mark.parametrize("words", [(), (b"snapshot",)])
async def test_numbers_from_0_are_filled_up_to_the_last_one(words: tuple[bytes, ...]) -> None:
    async with published(0, kv_events_history=64) as one, dealing(one) as socket:
        for _ in range(3000):
            one.keys.change()
        found = [message for message in await ask(socket, 0, *words) if words == () or message[3][:1] != b"\x87"]
        numbers = [int.from_bytes(message[2], "big") for message in found]
        assert numbers[-1] == one.stream.next_sequence - 1
        assert (numbers == [*range(one.stream.next_sequence)]) == (not words)
        held = HeldBlocks()
        for message in found:
            held.apply(decode(message[3]))
        assert held.counts() == one.keys.counts()
        assert one.outcomes() == {"snapshot": 1}


async def test_steps_go_on_while_numbers_are_filled() -> None:
    async with published(0, kv_events_history=64) as one, dealing(one) as socket:
        for _ in range(20_000):
            one.stream.publish(())
        asking, waits = asyncio.create_task(ask(socket, 0)), 0
        while not asking.done():
            waits += 1
            await asyncio.sleep(0)
        assert len(asking.result()) == 20_000
        assert waits > 20_000 / 64


async def test_a_planned_end_clears_all_blocks() -> None:
    heard: list[object] = []
    async with published() as one, listening(one.publication, on_batch=lambda _, events: heard.extend(events)) as here:
        one.stream.publish([stored(0, 3)])
        await until(here.complete.is_set)
        await settle(one, here)
        await one.publisher.finish(one.stream)
        await until(lambda: isinstance(heard[-1], AllBlocksCleared))
        assert here.follower.held.counts() == {}


async def test_a_replay_has_the_wanted_batches_and_vllms_end() -> None:
    async with published() as one, dealing(one) as socket:
        for number in range(10):
            one.stream.publish([stored(number, 1)])
        found = await ask(socket, EPOCH + 7)
        assert [int.from_bytes(message[2], "big") for message in found] == [EPOCH + 7, EPOCH + 8, EPOCH + 9]
        assert [len(message) for message in found] == [4, 4, 4]
        assert await ask(socket, EPOCH + 10) == []
        assert one.publisher.stats.replayed == 3
        assert one.outcomes() == {"replayed": 2}


@pytest.mark.parametrize("wanted", [0, 5, EPOCH - 1, EPOCH, EPOCH + (1 << 40)])
async def test_a_number_that_is_not_kept_is_answered_with_a_snapshot(wanted: int) -> None:
    async with published(kv_events_history=64) as one, dealing(one) as socket:
        for number in range(100):
            one.stream.publish([stored(number, 1)])
        found = await ask(socket, wanted)
        numbers = [int.from_bytes(message[2], "big") for message in found]
        assert numbers == sorted(set(numbers))
        assert numbers[-1] == EPOCH + 99
        assert min(numbers) >= (wanted if wanted < EPOCH + 99 else 0)
        assert isinstance(decode(found[0][3])[0], AllBlocksCleared)
        assert one.outcomes() == {"snapshot": 1}


async def test_an_asked_snapshot_begins_with_a_description() -> None:
    async with published(kv_events_topic="t") as one, dealing(one) as socket:
        one.keys.grow(3)
        described, *batches = await ask(socket, EPOCH, b"snapshot")
        assert described[:3] == [b"", b"t", sequence_bytes(EPOCH)]
        assert msgspec.msgpack.decode(described[3]) == {
            "epoch": EPOCH,
            "next_sequence": EPOCH + 1,
            "block_size": BLOCK_SIZE,
            "engine_id": "engine-1",
            "model": "tiny",
            "form": "map",
            "kinds": [{"name": "full_attention", "window": None}, {"name": "sliding_window", "window": 8}],
        }
        assert isinstance(decode(batches[0][3])[0], AllBlocksCleared)


async def test_events_go_on_while_a_snapshot_is_made() -> None:
    async with published() as one, dealing(one) as socket:
        for _ in range(500):
            one.keys.change()
        first = one.stream.next_sequence
        asking = asyncio.create_task(ask(socket, 0))
        while not asking.done():
            one.keys.change()
            await asyncio.sleep(0)
        numbers = [int.from_bytes(message[2], "big") for message in asking.result()]
        since = [number for number in numbers if number >= first]
        assert since, "the batches since the beginning follow the snapshot"
        assert since == [*range(since[0], since[-1] + 1)]


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"x", b"\0" * 8],
        [b"", b"\0" * 7],
        [b"", b"\0" * 8, b"what"],
        [b"", b"\0" * 8, b"snapshot", b""],
        [b"\0" * 8],
    ],
)
async def test_what_is_no_request_is_counted_and_ignored(frames: list[bytes]) -> None:
    async with published() as one, dealing(one) as socket:
        await socket.send_multipart(frames)
        await until(lambda: one.outcomes() == {"malformed": 1})
        assert await ask(socket, EPOCH) == [], "the next one is answered"


async def test_a_request_of_many_bytes_ends_its_connection() -> None:
    async with published() as one, dealing(one) as socket:
        await until(lambda: one.publisher.stats.connections["replay"] == 1)
        await socket.send_multipart([b"", b"\0" * 5000])
        await until(lambda: one.publisher.stats.connections["replay"] == 0)
        assert one.outcomes() == {}


def test_requests_are_those_of_vllm() -> None:
    assert parse_request([b"me", b"", b"\0" * 7 + b"\5"]) == (b"me", 5, False)
    assert parse_request([b"me", b"", b"\0" * 8, b"snapshot"]) == (b"me", 0, True)


async def test_requests_beyond_the_queue_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as socket:
        replays = Replays(socket, b"")
        for number in range(20):
            replays._add(parse_request([bytes([number]), b"", b"\0" * 8]))
        replays._add(parse_request([b"\0", b"", b"\0" * 8]))  # in place of its earlier one
        assert [(outcome.value, count) for outcome, count in replays.outcomes.items()] == [("queue_full", 4)]
        socket.close(linger=0)


async def test_a_client_that_does_not_read_its_replay_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replays.__init__, "__defaults__", (0.3,))
    async with published() as one:
        for number in range(4000):
            one.stream.publish([stored(number * 256, 256)])
        async with dealing(one, rcvhwm=1, rcvbuf=4096) as idle:
            await idle.send_multipart((b"", sequence_bytes(one.stream.oldest)))
            await until(lambda: one.outcomes() == {"stalled": 1})
        async with dealing(one) as other:
            assert len(await ask(other, one.stream.next_sequence - 3)) == 3, "others are answered"


async def test_a_client_that_left_is_given_up() -> None:
    async with published() as one:
        async with dealing(one) as socket:
            await socket.send_multipart((b"", sequence_bytes(EPOCH)))
            await until(lambda: one.publisher.stats.connections["replay"] == 1)
        await until(lambda: one.publisher.stats.connections["replay"] == 0)
        async with dealing(one) as other:
            assert await ask(other, EPOCH) == []


async def test_a_subscriber_that_never_reads_costs_bounded_memory_and_no_time() -> None:
    """100,000 batches of some 700 bytes, and a queue of 1,000 of them."""
    async with published(kv_events_queue=1000, kv_events_history=64) as one:
        with zmq.Context() as context, context.socket(zmq.SUB) as idle:
            idle.linger, idle.rcvhwm, idle.rcvbuf = 0, 1, 4096
            idle.subscribe(b"")
            idle.connect(f"tcp://{one.publisher.address}")
            await until(lambda: one.publisher.stats.connections["events"] == 1)
            batch = [stored(0, 16)]
            process = psutil.Process()
            for number in range(20_000):
                one.stream.publish(batch)
                if number % 100 == 0:
                    await asyncio.sleep(0.002)
            before, slowest = process.memory_info().rss, 0.0
            for number in range(80_000):
                begun = time.perf_counter()
                one.stream.publish(batch)
                slowest = max(slowest, time.perf_counter() - begun)
                if number % 100 == 0:
                    await asyncio.sleep(0.002)  # the thread that sends keeps up
            assert process.memory_info().rss - before < 16 << 20
            assert slowest < 1.0
            assert 1 <= one.publisher.stats.overflows < 20, "once, and again when the kernel's buffers have grown"


async def test_a_reader_misses_nothing_beside_one_that_never_reads() -> None:
    async with published(kv_events_queue=50) as one, listening(one.publication) as listener:
        with zmq.Context() as context, context.socket(zmq.SUB) as idle:
            idle.linger, idle.rcvhwm, idle.rcvbuf = 0, 1, 4096
            idle.subscribe(b"")
            idle.connect(f"tcp://{one.publisher.address}")
            await until(lambda: one.publisher.stats.connections["events"] == 2)
            await until(listener.complete.is_set)
            while not one.publisher.stats.overflows:
                one.stream.publish([stored(0, 200)])
                await until(lambda: listener.follower.expected == one.stream.next_sequence, 0)
            replays = listener.replays
            for _ in range(200):
                one.stream.publish([stored(0, 200)])
                await until(lambda: listener.follower.expected == one.stream.next_sequence, 0)
            assert listener.replays == replays


async def test_connections_are_counted() -> None:
    async with published() as one:
        assert one.publisher.stats.connections == {"events": 0, "replay": 0}
        async with listening(Publication(one.publisher.address)):
            await until(lambda: one.publisher.stats.connections == {"events": 1, "replay": 0})
        await until(lambda: one.publisher.stats.connections == {"events": 0, "replay": 0})


@pytest.mark.parametrize("name", ["kv_events_listen", "kv_events_replay_listen"])
async def test_a_port_in_use_is_named(name: str) -> None:
    async with published() as one:
        addresses: dict[str, Any] = {"kv_events_listen": ANY, "kv_events_replay_listen": ANY}
        settings = EngineSettings(**addresses | {name: one.publisher.address})
        with pytest.raises(AddressUnavailable, match=f"{name}: cannot listen on .*: Address already in use"):
            await EventPublisher(settings).bind()


async def test_a_host_that_does_not_resolve_is_named() -> None:
    with pytest.raises(AddressUnavailable, match=r"kv_events_listen: cannot listen on nowhere\.invalid:0"):
        await EventPublisher(EngineSettings(kv_events_listen="nowhere.invalid:0")).bind()


@pytest.mark.parametrize("host", ["localhost", "[::1]", "127.0.0.1"])
async def test_loopback_by_any_name(host: str) -> None:
    async with published(kv_events_listen=f"{host}:0") as one:
        assert one.publisher.address.startswith(f"{host}:")
        heard: list[int] = []
        publication = Publication(one.publisher.address)
        async with listening(publication, on_batch=lambda number, _: heard.append(number)):
            async with asyncio.timeout(SECONDS):
                while not heard:
                    one.stream.publish([Cleared()])
                    await asyncio.sleep(0.01)


async def test_connections_beyond_the_bound_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", 2)
    async with published() as one, listening(one.publication) as first, listening(one.publication) as second:
        await until(lambda: first.complete.is_set() and second.complete.is_set())
        async with listening(one.publication) as third:
            await until(lambda: third.complete.is_set() and one.publisher.stats.refused["events"])
            one.keys.grow(4)
            await settle(one, first)
            assert third.follower.expected is not None
            assert third.follower.expected < one.stream.next_sequence
