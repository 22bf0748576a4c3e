"""What can go wrong in the bookkeeping of blocks.

KVManagerError
├── ItemRefused              one item of a Step; the others go on
│   ├── OutOfBlocks          not enough free blocks now
│   ├── UnknownSequence      no such sequence or group
│   ├── UnknownPin           no such pin
│   ├── IdInUse              the sequence or group exists
│   ├── PinTooLarge          with this pinned, a live group would not fit
│   └── InvalidItem          a number is out of range
├── InvalidRegistration      a pool that cannot be
├── InvalidReport            a report that contradicts itself
├── StepOutOfOrder           a step number seen before
├── UnknownPool              no engine of this id is attached
├── UnknownRequest           no event of the request is kept
├── StaleIncarnation         a newer incarnation of the engine is attached
└── SessionReplaced          a newer session of the engine replaced this one
"""


class KVManagerError(Exception):
    """Base of everything that the KV manager refuses."""


class ItemRefused(KVManagerError):
    """One item of a Step was refused and nothing of it was done."""


class OutOfBlocks(ItemRefused):
    """Not enough free blocks now; the same item may be accepted later."""


class UnknownSequence(ItemRefused):
    """The sequence or group does not exist."""


class UnknownPin(ItemRefused):
    """The pin does not exist."""


class IdInUse(ItemRefused):
    """The sequence, group or pin exists already."""


class PinTooLarge(ItemRefused):
    """With this pinned, a live group would not fit into the rest."""


class InvalidItem(ItemRefused):
    """A number of the item is out of range."""


class InvalidRegistration(KVManagerError):
    """The described pool cannot be."""


class InvalidReport(KVManagerError):
    """The report contradicts itself; the message says where."""


class StepOutOfOrder(KVManagerError):
    """A step number that is not above all earlier ones."""


class UnknownPool(KVManagerError):
    """No engine of this id is attached."""


class UnknownRequest(KVManagerError):
    """No event of the request is in the ledger: it never was here, or that is long ago."""


class StaleIncarnation(KVManagerError):
    """A newer incarnation of the same engine is attached."""


class SessionReplaced(KVManagerError):
    """A newer session of the same engine replaced this one."""
