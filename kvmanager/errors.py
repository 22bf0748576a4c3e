"""Errors of the KV manager.

KVManagerError
├── ItemRefused              one item of a block step; the other items are applied
│   ├── OutOfBlocks          not enough free blocks now
│   ├── UnknownSequence      no such sequence or group
│   ├── UnknownPin           no such pin
│   ├── IdInUse              the sequence or group exists
│   ├── PinTooLarge          a live group would no longer fit beside this pin
│   └── InvalidItem          a number is out of range
├── InvalidRegistration      a pool with impossible properties
├── TooManyBlocks            a pool that is too large beside the others
├── InvalidReport            a report that contradicts itself
├── StepOutOfOrder           a step number that is not a new highest
├── UnknownPool              no engine with this id is attached
├── UnknownKind              the pool has no such kind of blocks
├── UnknownRequest           no pool, or no event of the ledger, is of the request
├── StaleIncarnation         a newer incarnation of the engine is attached
└── SessionReplaced          a newer session of the engine replaced this one
"""

from blocks import counted


class KVManagerError(Exception):
    """Base of the KV manager's errors."""


class ItemRefused(KVManagerError):
    """One item of a block step was refused and changed nothing."""


class OutOfBlocks(ItemRefused):
    """Not enough free blocks now; the same item may be accepted later."""


class UnknownSequence(ItemRefused):
    """The sequence or group does not exist."""


class UnknownPin(ItemRefused):
    """The pin does not exist."""


class IdInUse(ItemRefused):
    """The sequence, group or pin exists already."""


class PinTooLarge(ItemRefused):
    """Beside this pin, a live group would no longer fit into the pool."""


class InvalidItem(ItemRefused):
    """A number of the item is out of range."""


class InvalidRegistration(KVManagerError):
    """The registered pool has impossible properties. `field` is the path of the first of them."""

    def __init__(self, field: str, fault: str) -> None:
        """Say what is wrong with a field of the registration."""
        super().__init__(f"{field} {fault}")
        self.field = f"register.{field}"


class TooManyBlocks(KVManagerError):
    """Beside the other pools, this one is too large."""


class InvalidReport(KVManagerError):
    """The report contradicts itself; the message names the contradiction."""


class StepOutOfOrder(KVManagerError):
    """A step number that is not higher than all earlier ones."""


class UnknownPool(KVManagerError):
    """No engine with this id is attached."""


class UnknownKind(KVManagerError):
    """The pool has no kind of blocks with this name."""


class UnknownRequest(KVManagerError):
    """No event of the request is in the ledger: there was none, or it is no longer kept. Or it holds no blocks now."""


class StaleIncarnation(KVManagerError):
    """A newer incarnation of the same engine is attached."""


class SessionReplaced(KVManagerError):
    """A newer session of the same engine replaced this one."""


def shortage(needed: int, available: int, spare: int = 0, hits: int = 0, kind: str = "") -> str:
    """Return the message of OutOfBlocks for `needed` blocks, and `spare` that must stay free, with few `available`.

    `hits` are blocks without a holder that the request shares: they are neither needed nor available. `kind` is the
    name of a window kind.
    """
    verb, other = ("is" if count == 1 else "are" for count in (needed, available))
    kept = f" and {spare} more must stay free" if spare else ""
    cached = f" beside {hits} with its cached prefix" if hits else ""
    blocks = counted(needed, f"{kind} block" if kind else "block")
    return f"{blocks} {verb} needed{kept}, {available} {other} available{cached}"
