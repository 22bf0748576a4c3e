"""For which reasons a request may fail: only those that the product promises."""

from collections.abc import Sequence
from typing import NamedTuple

from services.runtime.errors import (
    DeadlineExceeded,
    GenerationFailed,
    InvalidField,
    Overloaded,
    RepeatedEngineLoss,
    ServiceError,
    Unavailable,
    UnknownModel,
)
from simulation.scenario import PlannedRequest

# Deadlines travel in whole nanoseconds.
_ROUNDING_SECONDS = 1e-6
# After two losses an engine computes the request alone; if it is lost too, the request may be given up.
_LOSSES_BEFORE_THE_LAST = 2

_DRAINING = "the gateway is draining"
# Why a failover may end, when it has waited for another engine for as long as it may.
_LOST = ("the engine was lost", "the engine is shutting down")
_AFTER_TOKENS = ("without its KV manager", *_LOST)
_WAITED = "no other engine accepted the request within"
_WITHHELD = "others are withheld or pinned"


class Circumstances(NamedTuple):
    """The state of a simulation when a request fails.

    `received`: the client has a token. `failed_steps` is the number of steps that were made to fail since the request
    began, `lost_engines` that of engines lost since its last token, without the last one. `has_bounds`: a queue may be
    full. `able` are the running engines that have room for it, and were not disturbed for a while.
    """

    seconds: float
    received: bool
    failed_steps: int
    lost_engines: int
    gateway_ends: bool
    withheld: bool
    fits: bool
    has_bounds: bool
    able: Sequence[str]


def failure_fault(request: PlannedRequest, error: ServiceError, known: Circumstances) -> str | None:
    """Return what is wrong with the failure of a request, if anything is."""
    match error:
        case DeadlineExceeded():
            early = request.timeout is None or known.seconds < request.timeout - _ROUNDING_SECONDS
            return f"after {known.seconds:.3f} s of {request.timeout}" if early else None
        case GenerationFailed():
            return None if known.failed_steps else "although no step was made to fail"
        case RepeatedEngineLoss():
            few = known.lost_engines < _LOSSES_BEFORE_THE_LAST
            return f"after {known.lost_engines + 1} losses since its last token" if few else None
        case Overloaded():
            return None if known.has_bounds and not known.received else "although no queue can be full"
        case InvalidField():
            return _invalid_fault(known)
        case Unavailable() | UnknownModel():
            return _unavailable_fault(str(error), known)
    return "for a reason that is not promised"


def _invalid_fault(known: Circumstances) -> str | None:
    if known.fits:
        return "although it fits"
    if known.received:
        return "after its first token"
    return f"although {known.able[0]} could serve it" if known.able else None


def _unavailable_fault(reason: str, known: Circumstances) -> str | None:
    if _DRAINING in reason:
        return None if known.gateway_ends and not known.received else "although its gateway does not end"
    if _WITHHELD in reason:
        if known.fits:
            return "although it fits beside the withheld blocks"
        return None if known.withheld else "although no block was withheld"
    if any(one in reason for one in _LOST) and _WAITED not in reason:
        return "without waiting for another engine"
    if known.received and not any(one in reason for one in _AFTER_TOKENS):
        return "after its first token"
    return f"although {known.able[0]} could serve it" if known.able else None
