"""What an engine refuses.

EngineError
├── RequestRefused           a submission that is not taken; names the field to blame
│   ├── RequestExists        the id is live
│   ├── InvalidRequest       a field is out of range, or the request can never fit
│   ├── UnsupportedField        a part of the contract that this engine does not serve
│   ├── QueueFull            too many requests wait
│   ├── EngineUnavailable    draining, or without its block manager for too long
│   └── SubmissionFailed     reading it raised what nobody had foreseen
├── PinRefused               a prefix that is not pinned; names the field to blame
│   ├── InvalidPin           a field is out of range
│   ├── PinExists            the name is in use for another prefix
│   ├── PinTooLarge          the pool has no room for it beside what is live
│   ├── UnknownPin           nothing is pinned under the name
│   ├── PinFailed            the step that computed it failed
│   └── PinUnavailable       draining, or without the block manager for too long
├── ModelUnsupported         a model that cannot be served, with the reason
├── BackendUnavailable       an attention backend that cannot run here, with the reason
├── ConstraintFailed         an output cannot go on in its language; ends one request
└── EngineBroken             the engine cannot go on
    ├── BlockManagerBroken   an answer of the block manager that contradicts the engine's own tables
    ├── CopyFailed           a copy of blocks was not made: what they hold is unknown
    └── DeviceLost           the device fails whatever it is asked for, until the process has ended
"""


class EngineError(Exception):
    """Base of everything that the engine refuses."""


class _FieldRefused(EngineError):
    """`field` is the path of the field to blame, empty when none is."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class RequestRefused(_FieldRefused):
    """A submission is not taken."""


class RequestExists(RequestRefused):
    """A request of this id is live."""


class InvalidRequest(RequestRefused):
    """A field is out of range, or the request can never fit."""


class UnsupportedField(RequestRefused):
    """A field asks for what this engine does not serve."""


class QueueFull(RequestRefused):
    """Too many requests wait already."""


class EngineUnavailable(RequestRefused):
    """The engine takes no requests now."""


class SubmissionFailed(RequestRefused):
    """Reading a submission raised what nobody had foreseen: a bug, which this request alone has met."""


class PinRefused(_FieldRefused):
    """A prefix is not pinned."""


class InvalidPin(PinRefused):
    """A field is out of range."""


class PinExists(PinRefused):
    """The name is in use for another prefix."""


class PinTooLarge(PinRefused):
    """The pool has no room for it beside what is live."""


class UnknownPin(PinRefused):
    """Nothing is pinned under the name."""


class PinFailed(PinRefused):
    """The step that computed it failed."""


class PinUnavailable(PinRefused):
    """The engine pins nothing now: it is draining, or was without its block manager for too long."""


class ModelUnsupported(EngineError):
    """The model cannot be served; the message says why."""


class BackendUnavailable(EngineError):
    """The attention backend cannot run on this machine, or not with such blocks; the message says why."""


class ConstraintFailed(EngineError):
    """An output cannot go on in the language that it must belong to, or finding out how takes too much.

    It is the matter of one request; no step fails by it.
    """


class EngineBroken(EngineError):
    """The engine cannot go on: it is the failure of no step, and ends the engine's incarnation."""


class BlockManagerBroken(EngineBroken):
    """The block manager refused what can never be refused, or answered a question that was not asked."""


class CopyFailed(EngineBroken):
    """A copy of blocks was not made, so what they hold is not what the block manager's books say."""


class DeviceLost(EngineBroken):
    """The device answers every call with an error, also those that have nothing to do with what went wrong."""
