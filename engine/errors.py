"""Errors of the engine.

EngineError
├── RequestRefused           a submission is refused; `field` names the offending field
│   ├── RequestExists        a live request has the same id
│   ├── InvalidRequest       a field is out of range, or the request can never fit
│   ├── UnsupportedField     a field that this engine does not support
│   ├── QueueFull            too many requests wait
│   ├── EngineUnavailable    draining, disconnected for too long, or without room beside withheld blocks
│   └── SubmissionFailed     parsing the submission raised an unexpected error
├── PinRefused               a prefix is not pinned; `field` names the offending field
│   ├── InvalidPin           a field is out of range
│   ├── PinExists            the name is in use for another prefix
│   ├── PinTooLarge          the pool has no room for it beside the live requests
│   ├── UnknownPin           no prefix is pinned under the name
│   ├── PinFailed            the step that computed the prefix failed
│   └── PinUnavailable       draining, or disconnected from the block manager for too long
├── ModelUnsupported         the model cannot be served
├── BackendUnavailable       the attention backend cannot run here
├── HostTierUnavailable      the memory of the host tier cannot be allocated or pinned
├── ConstraintFailed         an output cannot continue under its constraint; ends one request
└── EngineBroken             the engine cannot continue
    ├── BlockManagerBroken   a result of the block manager contradicts the engine's tables
    ├── KeptMemoryLost       another process has taken over the memory of the blocks
    ├── CopyFailed           a copy of blocks failed, so their contents are unknown
    ├── DeviceLost           the device fails every call until the process ends
    └── RankFailed           a rank of the model has ended, failed or stopped
"""

_LONGEST_MESSAGE = 2000  # characters of ModelUnsupported


class EngineError(Exception):
    """Base of all errors of the engine."""


class _FieldRefused(EngineError):
    """`field` is the path of the offending field, empty if there is none."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class RequestRefused(_FieldRefused):
    """A submission is refused."""


class RequestExists(RequestRefused):
    """A live request has the same id."""


class InvalidRequest(RequestRefused):
    """A field is out of range, or the request can never fit."""


class UnsupportedField(RequestRefused):
    """A field that this engine does not support is set."""


class QueueFull(RequestRefused):
    """Too many requests wait."""


class EngineUnavailable(RequestRefused):
    """The engine accepts no requests now, or withheld blocks leave this one no room."""


class SubmissionFailed(RequestRefused):
    """Parsing a submission raised an unexpected error: a bug that affects this request only."""


class PinRefused(_FieldRefused):
    """A prefix is not pinned."""


class InvalidPin(PinRefused):
    """A field is out of range."""


class PinExists(PinRefused):
    """The name is in use for another prefix."""


class PinTooLarge(PinRefused):
    """The pool has no room for the prefix beside the live requests."""


class UnknownPin(PinRefused):
    """No prefix is pinned under the name."""


class PinFailed(PinRefused):
    """The step that computed the prefix failed."""


class PinUnavailable(PinRefused):
    """The engine pins nothing now: it is draining, or was disconnected from its block manager for too long."""


class ModelUnsupported(EngineError):
    """The model cannot be served; the message says why.

    It may have texts of a stranger's file: what is not printable becomes escapes, and a long text loses its middle.
    """

    def __init__(self, message: str) -> None:
        super().__init__(_printable(message))


class BackendUnavailable(EngineError):
    """The attention backend cannot run on this machine, or not with this block size; the message says why."""


class HostTierUnavailable(EngineError):
    """The memory of the host tier cannot be allocated, or not be pinned for the GPU; the message says why."""


class ConstraintFailed(EngineError):
    """An output cannot continue under its constraint, or evaluating the constraint exceeds its limits.

    Affects one request; no step fails by it.
    """


class EngineBroken(EngineError):
    """The engine cannot continue. The error ends the engine's incarnation and belongs to no single step."""


class BlockManagerBroken(EngineBroken):
    """The block manager refused an item that must succeed, or answered a step that is not in flight."""


class KeptMemoryLost(EngineBroken):
    """Another process has taken over the memory of the blocks."""


class CopyFailed(EngineBroken):
    """A copy of blocks failed, so their contents differ from the block manager's tables."""


class DeviceLost(EngineBroken):
    """The device fails every call, including calls unrelated to the original error."""


class RankFailed(EngineBroken):
    """A rank of the model has ended, failed or stopped, so the others cannot continue; the message names it."""


def _printable(text: str) -> str:
    if len(text) > _LONGEST_MESSAGE:
        text = f"{text[: _LONGEST_MESSAGE // 2]} ... {text[-_LONGEST_MESSAGE // 2 :]}"
    words = " ".join(text.split("\n"))
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in words)
