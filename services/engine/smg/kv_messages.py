"""KV events in smg's messages."""

from array import array
from collections.abc import Iterable, Iterator

from smg_grpc_proto.generated import common_pb2

from services.engine.events.changes import KeyChange, KeyPlace, Medium, Removed, Stored

# The tier of a medium, and its older form.
_TIERS = {
    Medium.GPU: (common_pb2.KV_CACHE_TIER_DEVICE, 0),
    Medium.CPU: (common_pb2.KV_CACHE_TIER_HOST, 1),
}


def wire_hash(key: bytes) -> int:
    """Return the low 64 bits of a key as a signed number."""
    return int.from_bytes(key[-8:], "big", signed=True)


def events_of(changes: Iterable[KeyChange]) -> Iterator[common_pb2.KvCacheEvent]:
    """Yield the events of changes, without numbers, as those of a snapshot are."""
    for change in changes:
        match change:
            case Stored():
                yield common_pb2.KvCacheEvent(stored=_stored(change))
            case Removed():
                yield common_pb2.KvCacheEvent(removed=_removed(change))
            case _:
                yield common_pb2.KvCacheEvent(cleared=common_pb2.KvCacheCleared())


def _stored(change: Stored) -> common_pb2.KvBlocksStored:
    tier, level = _TIERS[change.place.medium]
    message = common_pb2.KvBlocksStored(
        parent_block_hash=None if change.parent is None else wire_hash(change.parent),
        cache_salt=change.salt or None,
        tier=tier,
        **_place(change.place),
    )
    for key, own in zip(change.keys, change.tokens, strict=True):
        tokens = array("i", own).tolist()
        message.blocks.add(block_hash=wire_hash(key), token_ids=tokens, block_size=len(tokens), cache_level=level)
    if change.salt and change.parent is None:
        message.blocks[0].extra_keys.add(text=change.salt)
    return message


def _removed(change: Removed) -> common_pb2.KvBlocksRemoved:
    tier, level = _TIERS[change.place.medium]
    hashes = map(wire_hash, change.keys)
    return common_pb2.KvBlocksRemoved(block_hashes=hashes, cache_level=level, tier=tier, **_place(change.place))


def _place(place: KeyPlace) -> dict[str, str | int]:
    return {"medium": place.medium.value, "group_idx": place.kind}
