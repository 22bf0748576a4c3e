"""pin, unpin, reset: what operators do to the prefix cache."""

from kvmanager import limits
from kvmanager.books import Books
from kvmanager.errors import IdInUse, InvalidItem, PinTooLarge, UnknownPin
from kvmanager.step import Pin, PinChange, Reset, StepItem, StepResult, Unpin


def change_pins(books: Books, item: PinChange, result: StepResult) -> None:
    """Pin, unpin or reset."""
    match item:
        case Pin():
            _pin(books, item, result)
        case Unpin():
            _unpin(books, item, result)
        case Reset():
            _reset(books, item, result)


def _pin(books: Books, item: Pin, result: StepResult) -> None:
    sequence = books.on_device(item.sequence)
    if not item.pin_id:
        raise InvalidItem("pin_id is empty")
    if item.pin_id in books.pins:
        raise IdInUse(f"pin {item.pin_id!r} exists")
    if not 1 <= item.block_count <= sequence.committed:
        raise InvalidItem(f"block_count is {item.block_count}, but {sequence.committed} blocks have keys")
    if len(books.pins) >= limits.MOST_PINS:
        raise InvalidItem(f"the pool has {limits.MOST_PINS} pins, which is all that it may have")
    books.check_shares(item.block_count)
    blocks = sequence.table[: item.block_count]
    _check_others_fit(books, blocks)
    for block in blocks:
        books.device.hold(block)
    books.pins[item.pin_id] = blocks
    result.deeds.append((StepItem.PIN, sequence.id, sequence.group, blocks, (), item))


def _check_others_fit(books: Books, blocks: list[int]) -> None:
    """Raise PinTooLarge where a live group could then not have in the device what it has now.

    What a group may still grow to is known to its engine alone, which checks that before it asks.
    """
    pinned = {block for pin in books.pins.values() for block in pin}.union(blocks)
    rest = books.device.total - books.device.counts.withheld - len(pinned)
    for group in books.groups:
        members = books.members(group)
        held = {block for member in members for block in member.table}
        needed = len(held) if members[0].swapped else len(held - pinned)
        if needed > rest:
            raise PinTooLarge(f"group {group} has {needed} blocks that are not pinned, but only {rest} would be left")


def _unpin(books: Books, item: Unpin, result: StepResult) -> None:
    if item.pin_id not in books.pins:
        raise UnknownPin(f"there is no pin {item.pin_id!r}")
    blocks = books.pins.pop(item.pin_id)[::-1]
    books.device.release_many(blocks)
    result.deeds.append((StepItem.PIN, 0, 0, blocks, (), item))


def _reset(books: Books, item: Reset, result: StepResult) -> None:
    """Forget all keys in both tiers. What sequences that began before it still commit is never found after it."""
    books.resets += 1
    books.device.forget_keys()
    books.host.forget_keys()
    result.deeds.append((StepItem.PIN, 0, 0, (), (), item))
