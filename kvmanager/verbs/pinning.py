"""pin, unpin, reset: operators' changes to the prefix cache."""

from blocks import Pin, PinChange, Reset, StepItem, Unpin, counted
from kvmanager import limits
from kvmanager.applied import Outcome
from kvmanager.errors import IdInUse, InvalidItem, PinTooLarge, UnknownPin
from kvmanager.parts import Parts, parts_of
from kvmanager.pool_state import PoolState, SequenceTable


def change_pins(state: PoolState, item: PinChange, outcome: Outcome) -> Parts:
    """Pin, unpin or reset."""
    match item:
        case Pin():
            return _pin(state, item, outcome)
        case Unpin():
            return _unpin(state, item, outcome)
        case Reset():
            return _reset(state, item, outcome)


def _pin(state: PoolState, item: Pin, outcome: Outcome) -> Parts:
    sequence = check_pin(state, item)
    blocks = sequence.table[: item.block_count]
    yield from checking_others_fit(state, blocks)
    yield from pinning(state, item, blocks, outcome)


def check_pin(state: PoolState, item: Pin) -> SequenceTable:
    """Return the sequence whose blocks are to be pinned. Raises ItemRefused unless they can be, if others fit."""
    sequence = state.on_device(item.sequence)
    if not item.pin_id:
        raise InvalidItem("pin_id must not be empty")
    if item.pin_id in state.pins:
        raise IdInUse(f"pin {item.pin_id!r} already exists")
    if not 1 <= item.block_count <= sequence.committed_blocks:
        committed = sequence.committed_blocks
        raise InvalidItem(
            f"block_count must be between 1 and {committed}, the committed blocks, not {item.block_count}"
        )
    if len(state.pins) >= limits.MAX_PINS:
        raise InvalidItem(f"the pool already has {limits.MAX_PINS} pins, which is the maximum")
    state.check_shares(item.block_count)
    return sequence


def pinning(state: PoolState, item: Pin, blocks: list[int], outcome: Outcome) -> Parts:
    """Hold the blocks of a pin."""
    sequence = state.sequences[item.sequence]
    for part in parts_of(blocks):
        state.device.hold(part)
        state.in_flight += part
        yield len(part)
    state.in_flight.clear()
    state.pins[item.pin_id] = blocks
    outcome.effects.append((StepItem.PIN, sequence.id, sequence.group, blocks, (), item))


def checking_others_fit(state: PoolState, blocks: list[int]) -> Parts:
    """Raise PinTooLarge if the present blocks of a live group would not fit into the device beside all pins.

    Only the engine knows how far a group may grow, so it checks that before it sends the pin.
    """
    pinned = bytearray(state.device.total + 1)
    for pin in (*state.pins.values(), blocks):
        for part in parts_of(pin):
            for block in part:
                pinned[block] = 1
            yield len(part)
    rest = state.device.total - state.device.counts.withheld - pinned.count(1)
    for group_part in parts_of(list(state.groups)):
        for group in group_part:
            members = state.members(group)
            if sum(len(member.table) for member in members) > rest:  # else it fits, even if nothing is pinned or shared
                yield from _checking_fits(state, group, members, pinned, rest)
        yield len(group_part)


def _checking_fits(state: PoolState, group: int, members: list[SequenceTable], pinned: bytearray, rest: int) -> Parts:
    held = bytearray(max(state.device.total, state.host.total) + 1)
    needed = 0
    for member in members:
        for part in parts_of(member.table):
            for block in part:
                needed += not held[block] and (member.swapped or not pinned[block])
                held[block] = 1
            yield len(part)
    if needed > rest:
        raise PinTooLarge(f"group {group} has {counted(needed, 'unpinned block')}, but only {rest} would remain")


def _unpin(state: PoolState, item: Unpin, outcome: Outcome) -> Parts:
    if item.pin_id not in state.pins:
        raise UnknownPin(f"pin {item.pin_id!r} does not exist")
    blocks = state.pins.pop(item.pin_id)
    outcome.effects.append((StepItem.PIN, 0, 0, blocks[::-1], (), item))
    return state.releasing(blocks)


def _reset(state: PoolState, item: Reset, outcome: Outcome) -> Parts:
    """Remove all keys from the indexes of both tiers. Sequences that began before never match sequences after it."""
    state.resets += 1
    yield from state.device.resetting_keys()
    yield from state.host.resetting_keys()
    outcome.effects.append((StepItem.PIN, 0, 0, (), (), item))
