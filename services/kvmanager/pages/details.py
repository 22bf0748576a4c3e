"""Details of one block or one sequence for the page, without salts, tokens and tenants."""

from typing import Any

from kvmanager import KVManager, Pool, PoolState, SequenceTable, Session, UnknownRequest, entries_of, state_of
from services.kvmanager.renderer import event_json, request_name, summary, without_tenants
from services.runtime.errors import InvalidField
from services.runtime.slices import run_in_slices

_MAX_EVENTS = 10
_MAX_SEQUENCES = 500
# Slices of an explanation or a search, of some microseconds each, between two pauses.
_SLICES = 50


async def block_json(manager: KVManager, session: Session, block: int, *, host: bool, kind: str = "") -> dict[str, Any]:
    """Describe a block of a kind, empty for kind 0: its state, key, holders and latest events.

    Raises InvalidField and UnknownKind.
    """
    pool = session.pool
    state = pool.state.of_kind(kind)
    tier = state.host if host else state.device
    if not tier.total:
        raise InvalidField("tier must be device, because the pool has no host blocks", "tier")
    if not 1 <= block <= tier.total:
        raise InvalidField(f"block must be between 1 and {tier.total}, not {block}", "block")
    number = pool.state.kinds.index(state)
    entries = await run_in_slices(entries_of(pool.state, block, host=host, kind=number))
    ledger, engine_id = manager.ledger, pool.spec.engine_id
    events_of_block = ledger.block_events(engine_id, block, host=host, count=_MAX_EVENTS, kind=number)
    events = await run_in_slices(events_of_block, _SLICES)
    key = tier.key(block)
    return {
        "block": block,
        "tier": "host" if host else "device",
        "kind": kind,
        "state": state_of(tier, block).name.lower(),
        "count": tier.ref_count(block),
        "key": key.hex() if key else "",
        "outlived": block in tier.keys.outlived,
        "block_size": pool.spec.block_size,
        "holders": [_holder(pool, *entry) for entry in entries if entry.sequence in pool.sequences],
        "pins": 0 if host else sum(block in blocks for blocks in state.pins.values()),
        "events": [event_json(event) for event in reversed(events)],
    }


def _holder(pool: Pool, number: int, logical: int, tokens: int) -> dict[str, Any]:
    name = request_name(pool.sequences[number].request_id)
    return {"sequence": number, "request": name, "logical": logical, "tokens": tokens}


def sequences_json(session: Session) -> list[dict[str, Any]]:
    """List the latest sequences, newest first, up to a bound."""
    sequences = session.pool.sequences
    latest = list(sequences)[: -_MAX_SEQUENCES - 1 : -1]
    return [_sequence(sequences[number]) for number in latest]


def _window(kind: PoolState, number: int) -> dict[str, Any]:
    sequence = kind.sequences[number]
    return {"name": kind.kind_name, "dropped": sequence.dropped, "table": sequence.table[:]}


def _sequence(sequence: SequenceTable) -> dict[str, Any]:
    return {
        "sequence": sequence.id,
        "group": sequence.group,
        "request": request_name(sequence.request_id),
        "tier": "host" if sequence.swapped else "device",
        "blocks": len(sequence.table),
        "tokens": sequence.computed_tokens,
        "room": sequence.room_tokens,
    }


async def sequence_json(manager: KVManager, session: Session, number: int) -> dict[str, Any]:
    """Describe a live sequence with its block table and explanation; an ended one as not live."""
    pool = session.pool
    sequence = pool.sequences.get(number)
    if sequence is None:
        return {"sequence": number, "live": False}
    try:
        explanation = await run_in_slices(manager.ledger.explaining(sequence.request_id), _SLICES)
        explained = without_tenants(summary(explanation))
    except UnknownRequest:
        explained = "Its events are no longer kept."
    tier = pool.host if sequence.swapped else pool.device
    return _sequence(sequence) | {
        "live": True,
        "block_size": pool.spec.block_size,
        "table": sequence.table[:],
        "windows": [_window(kind, number) for kind in pool.windows],
        "counts": [tier.ref_count(block) for block in sequence.table],
        "keyed": [int(tier.key(block) is not None) for block in sequence.table],
        "committed": sequence.committed_blocks,
        "prompt": sequence.prompt_tokens,
        "siblings": [one for one in sorted(pool.groups.get(sequence.group, ())) if one != number],
        "explain": explained,
    }
