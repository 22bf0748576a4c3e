"""Payloads read by decoders of the shapes that other routers accept.

Each decoder here follows what its router checks, no more:

* llm-d: `pkg/kvevents/engineadapter/vllm_adapter.go` of llm-d-kv-cache (f5ae8784, 0d2ae546): arrays; the topic is
  kv@pod@model.
* AIBrix: `pkg/cache/kvcache/msgpack_decoder.go` (059fe5ec): a batch of 2 or 3 elements whose rank is an integer;
  arrays, and maps since vLLM 0.24.
* kthena: `python/kthena/runtime/zmq_subscriber.py` (2bb05ecc): arrays by msgspec, topic kv-events.
* Mooncake: `docs/source/design/kv-event/subscriber-guide.md`: maps in a batch of exactly three elements.
* Dynamo: `lib/kv-router/src/zmq_wire`: maps or arrays, integers only, one block size, no hash twice.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from services.engine.events.changes import Cleared, KeyChange, Stored
from services.engine.events.event_stream import EventBatch
from services.engine.events.zeromq.vllm_format import FULL_ATTENTION, AttentionKind, Encoder, wire_hash
from tests.key_changes import BLOCK_SIZE, PLACES, removed, stored

CHANGES: list[KeyChange] = [stored(0, 3, salt="5a17"), stored(3, 2, parent=2), removed(4), Cleared()]
HASHES = [[wire_hash(key) for key in one.keys] for one in CHANGES if isinstance(one, Stored)]
Tags = list[str]


def payload(*, arrays: bool) -> bytes:
    return Encoder(BLOCK_SIZE, [AttentionKind(FULL_ATTENTION)], arrays=arrays).encode(EventBatch(7, 12.5, CHANGES))


def is_integer(value: object, bits: int = 64) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << bits


def by_llmd(data: bytes) -> Tags:
    """A Go struct for each array: too many elements are skipped, missing ones are zero."""
    timestamp, events, *rank = msgspec.msgpack.decode(data)
    assert isinstance(timestamp, float)
    assert all(is_integer(one) for one in rank)
    for tag, *fields in events:
        assert isinstance(tag, str)
        if tag == "BlockStored":
            hashes, parent, tokens, size, lora, medium, lora_name = fields[:7]
            assert all(is_integer(one) for one in hashes)
            assert parent is None or is_integer(parent)
            assert all(is_integer(one, 32) for one in tokens)
            assert is_integer(size)
            assert lora is None
            assert lora_name is None
            assert medium in ("GPU", "CPU")
        if tag == "BlockRemoved":
            assert all(is_integer(one) for one in fields[0])
            assert fields[1] in ("GPU", "CPU")
    return [event[0] for event in events]


def by_aibrix(data: bytes) -> Tags:
    """Tokens are grouped by block; optional fields by their position or name."""
    batch = msgspec.msgpack.decode(data)
    assert isinstance(batch[0], float)
    assert len(batch) == 2 or (len(batch) == 3 and is_integer(batch[2]))
    tags = []
    names = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name")
    further = ("extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality")
    for event in batch[1]:
        removes = "BlockRemoved" in (event[0] if isinstance(event, list) else event["type"])
        fields = ("block_hashes", "medium", "group_idx") if removes else (*names, *further)
        found = event if isinstance(event, dict) else dict(zip(("type", *fields), event, strict=False))
        tags.append(found["type"])
        if found["type"] == "BlockStored":
            assert len(event) >= 5
            assert len(found["token_ids"]) == len(found["block_hashes"]) * found["block_size"]
            assert all(one is None or isinstance(one, list) for one in found.get("extra_keys") or ())
        if found["type"] != "AllBlocksCleared":
            assert all(is_integer(one) for one in found["block_hashes"])
            assert isinstance(found.get("medium"), str)
            assert is_integer(found["group_idx"])
    return tags


class KthenaStored(msgspec.Struct, array_like=True, omit_defaults=True, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None


class KthenaRemoved(msgspec.Struct, array_like=True, omit_defaults=True, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None = None


class KthenaCleared(msgspec.Struct, array_like=True, omit_defaults=True, tag="AllBlocksCleared"):
    pass


class KthenaBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[KthenaStored | KthenaRemoved | KthenaCleared]
    data_parallel_rank: int | None = None


def by_kthena(data: bytes) -> Tags:
    batch = msgspec.msgpack.decode(data, type=KthenaBatch)
    return [str(type(one).__struct_config__.tag) for one in batch.events]


def by_mooncake(data: bytes) -> Tags:
    """Checks each event by itself, and refuses fields of another."""
    timestamp, events, rank = msgspec.msgpack.decode(data)
    assert isinstance(timestamp, float)
    assert rank is None or is_integer(rank)
    of_stored = {"parent_block_hash", "token_ids", "block_size", "lora_id", "lora_name"}
    for event in events:
        if event["type"] == "BlockStored":
            assert event.keys() >= of_stored | {"block_hashes", "medium"}
            assert event["lora_id"] is None
            assert event["kv_cache_spec_kind"] == "full_attention"
            assert event.get("kv_cache_spec_sliding_window") is None
            assert len(event.get("extra_keys") or event["block_hashes"]) == len(event["block_hashes"])
        elif event["type"] == "BlockRemoved":
            assert event.keys() >= {"block_hashes", "medium"}
            assert not event.keys() & of_stored
        else:
            assert event.keys() == {"type"}
        assert event.get("group_idx", 0) == 0
    return [event["type"] for event in events]


def by_dynamo(data: bytes) -> Tags:
    _timestamp, events, _rank = msgspec.msgpack.decode(data)
    for event in events:
        found: Any = event if isinstance(event, dict) else dict(enumerate(event))
        hashes = found.get("block_hashes", found.get(1)) or []
        parent = found.get("parent_block_hash", found.get(2)) if "Stored" in found.get("type", found.get(0)) else None
        assert len({*hashes, parent}) == len(hashes) + 1, "no hash occurs twice, nor as its own parent"
        assert all(is_integer(one) for one in hashes)
    return [event["type"] if isinstance(event, dict) else event[0] for event in events]


@pytest.mark.parametrize(
    ("read", "arrays"),
    [
        (by_llmd, True),
        (by_aibrix, True),
        (by_aibrix, False),
        (by_kthena, True),
        (by_mooncake, False),
        (by_dynamo, True),
        (by_dynamo, False),
    ],
)
def test_other_routers_read_events(read: Callable[[bytes], Tags], arrays: bool) -> None:
    assert read(payload(arrays=arrays)) == ["BlockStored", "BlockStored", "BlockRemoved", "AllBlocksCleared"]


def test_hashes_are_the_low_64_bits_in_every_form() -> None:
    maps, arrays = (msgspec.msgpack.decode(payload(arrays=one))[1] for one in (False, True))
    assert [event["block_hashes"] for event in maps[:2]] == HASHES
    assert [event[1] for event in arrays[:2]] == HASHES
    assert maps[1]["parent_block_hash"] == arrays[1][2] == HASHES[0][-1]
    assert PLACES[0].medium.value == maps[0]["medium"] == arrays[0][6]
