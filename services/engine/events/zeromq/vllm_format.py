"""KV events as vLLM writes them, from values to msgpack and back.

Source: `distributed/kv_events.py` of vLLM 0.32 and 0.33. A batch is an array `[timestamp, events, rank]`, where the
timestamp is in seconds since 1970. An event is a map with its name as `type` (vLLM since 0.24), or an array that begins
with its name (before, and for kthena still). A map has no fields with their defaults, an array has all. Maps may have
more fields: locality, ownership and session_id since vLLM 0.32, lookahead_token_ids since 0.33, all null by default.

Block hashes are unsigned integers: the low 64 bits of a key, which is how routers shorten longer ones. The rank of data
parallelism is 0, as vLLM has it without data parallelism: Mooncake reads only batches of three elements, AIBrix none
whose rank is null. LoRA is null.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from services.engine.events.changes import KeyChange, KeyPlace, Removed, Stored
from services.engine.events.event_stream import EventBatch

FULL_ATTENTION, SLIDING_WINDOW, CHUNKED = "full_attention", "sliding_window", "chunked_local_attention"
_RANK = 0
# The first byte of a map in msgpack: fixmap, map 16, map 32.
_FIXMAP, _FIXMAP_END, _MAPS = 0x80, 0x8F, (0xDE, 0xDF)
_HASH_BYTES = 8

BlockHash = int | bytes


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False):
    """Blocks of one chain that are at a medium now."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, gc=False):
    """Blocks that are at a medium no longer."""

    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False):
    """No medium has a block."""


class _StoredMap(BlockStored, tag="BlockStored"):
    cache_salt: str | None = None  # for Dynamo, which takes no string of extra_keys for a salt


class _RemovedMap(BlockRemoved, tag="BlockRemoved"):
    pass


class _ClearedMap(AllBlocksCleared, tag="AllBlocksCleared"):
    pass


class _StoredArray(BlockStored, array_like=True, tag="BlockStored"):
    pass


class _RemovedArray(BlockRemoved, array_like=True, tag="BlockRemoved"):
    pass


class _ClearedArray(AllBlocksCleared, array_like=True, tag="AllBlocksCleared"):
    pass


WireEvent = BlockStored | BlockRemoved | AllBlocksCleared


class _EncodedBatch(msgspec.Struct, array_like=True, gc=False):
    timestamp: float
    events: list[WireEvent]
    data_parallel_rank: int


class _RawBatch(msgspec.Struct, array_like=True, gc=False):
    timestamp: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


class AttentionKind(NamedTuple):
    """A kind of blocks, by vLLM's name of its attention, and its sliding window in tokens."""

    name: str
    window: int | None = None


class InvalidBatch(ValueError):
    """A message is no batch of KV events."""


class Encoder:
    """Encodes batches of one engine."""

    def __init__(self, block_size: int, kinds: Sequence[AttentionKind], *, arrays: bool = False) -> None:
        """Encode blocks of `block_size` tokens; `kinds` has the kinds of blocks by number."""
        self._block_size = block_size
        self._kinds = kinds
        self._types = (_StoredArray, _RemovedArray, _ClearedArray) if arrays else _MAP_TYPES
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, batch: EventBatch) -> bytes:
        """Return the payload of a batch."""
        return self._encoder.encode(_EncodedBatch(batch.timestamp, [*map(self._event, batch.changes)], _RANK))

    def _event(self, change: KeyChange) -> WireEvent:
        stored, removed, cleared = self._types
        if isinstance(change, Stored):
            return self._stored(stored, change)
        if isinstance(change, Removed):
            return removed([*map(wire_hash, change.keys)], change.place.medium.value, change.place.kind)
        return cleared()

    def _stored(self, event: type[BlockStored], change: Stored) -> BlockStored:
        kind = self._kinds[change.place.kind]
        own = {"cache_salt": change.salt} if event is _StoredMap and _begins_with_salt(change) else {}
        return event(
            [*map(wire_hash, change.keys)],
            None if change.parent is None else wire_hash(change.parent),
            change.token_ids.tolist(),
            self._block_size,
            None,
            change.place.medium.value,
            None,
            _extra_keys(change),
            change.place.kind,
            kind.name,
            kind.window,
            **own,
        )


_MAP_TYPES = (_StoredMap, _RemovedMap, _ClearedMap)
_BATCH = msgspec.msgpack.Decoder(_RawBatch)
_OF_MAPS: msgspec.msgpack.Decoder[WireEvent] = msgspec.msgpack.Decoder(_StoredMap | _RemovedMap | _ClearedMap)
_OF_ARRAYS: msgspec.msgpack.Decoder[WireEvent] = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)


def wire_hash(key: bytes) -> int:
    """Return the hash by which routers identify a key."""
    return int.from_bytes(key[-_HASH_BYTES:], "big")


def hashes(event: BlockStored | BlockRemoved) -> Iterator[int]:
    """Yield the hashes of an event as integers; of bytes, the last 8."""
    return (one if isinstance(one, int) else wire_hash(one) for one in event.block_hashes)


def decode(payload: bytes) -> list[WireEvent]:
    """Return the events of a batch in either form. Raises InvalidBatch."""
    try:
        return [_decoder(bytes(raw)).decode(raw) for raw in _BATCH.decode(payload).events]
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidBatch(str(error)) from error


def place_of(event: BlockStored | BlockRemoved) -> tuple[int, str]:
    """Return the number of the kind, and the medium; without them, those of vLLM before it had them."""
    return event.group_idx or 0, event.medium or "GPU"


def key_place(place: KeyPlace) -> tuple[int, str]:
    """Return a place as `place_of` returns it."""
    return place.kind, place.medium.value


def _extra_keys(change: Stored) -> list[list[Any] | None] | None:
    """Return the salt of the first block of a prompt, as vLLM writes a `cache_salt`."""
    return [[change.salt], *[None] * (len(change.keys) - 1)] if _begins_with_salt(change) else None


def _begins_with_salt(change: Stored) -> bool:
    return change.parent is None and bool(change.salt)


def _decoder(raw: bytes) -> "msgspec.msgpack.Decoder[WireEvent]":
    is_map = raw and (_FIXMAP <= raw[0] <= _FIXMAP_END or raw[0] in _MAPS)
    return _OF_MAPS if is_map else _OF_ARRAYS
