"""What the services refuse beyond their cores. `services.runtime.statuses` has the status of each."""

from enum import Enum

FIELD_METADATA = "quire-field"
# Where nobody can foresee when there is room.
_COME_AGAIN_SECONDS = 1.0


class RejectionReason(Enum):
    """Why a gateway did not let a request in that had nothing wrong in it."""

    MAX_REQUESTS = "max_requests"  # too many are under way
    MAX_QUEUED_TOKENS = "max_queued_tokens"  # too many tokens wait for engines
    TENANT_REQUESTS = "tenant_requests"  # too many are under way of its tenant
    TENANT_TOKENS = "tenant_tokens"  # the tenant has used up its tokens
    ENGINE_QUEUE = "engine_queue"  # every engine's own queue is full
    DRAINING = "draining"
    UNAVAILABLE = "unavailable"  # no engine of the model takes requests
    UNAUTHENTICATED = "unauthenticated"


class ServiceError(Exception):
    """Base of everything that a service refuses. `field` is the path of the field to blame, empty when none is.

    `rejection` says why a request was not let in, None where it is wrong or had been let in.
    """

    rejection: RejectionReason | None = None

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class InvalidField(ServiceError):
    """A field is out of range."""


class UnsupportedField(ServiceError):
    """A part of the contract that this version does not serve."""


class UnexpectedMessage(ServiceError):
    """A message that does not belong at this place of a stream."""


class Unauthenticated(ServiceError):
    """The API key is missing, wrong or expired."""

    rejection = RejectionReason.UNAUTHENTICATED


class PermissionDenied(ServiceError):
    """The API key does not allow it."""


class UnknownModel(ServiceError):
    """No such model is served."""


class RequestExists(ServiceError):
    """The request id is in use."""


class UnknownPin(ServiceError):
    """Nothing is pinned under the name."""


class PinExists(ServiceError):
    """The name is in use for another prefix."""


class PinTooLarge(ServiceError):
    """The pool has no room for a prefix beside what is pinned and live."""


class Overloaded(ServiceError):
    """A queue is full, or a tenant at its limit.

    `retry_seconds` is when there is room again, as far as that can be foreseen.
    """

    def __init__(
        self,
        message: str,
        field: str = "",
        retry_seconds: float = _COME_AGAIN_SECONDS,
        rejection: RejectionReason = RejectionReason.ENGINE_QUEUE,
    ) -> None:
        super().__init__(message, field)
        self.retry_seconds = retry_seconds
        self.rejection = rejection


class SlowClient(ServiceError):
    """The client did not read its stream."""


class Unavailable(ServiceError):
    """Draining, or another service is away."""

    def __init__(self, message: str, field: str = "", rejection: RejectionReason | None = None) -> None:
        super().__init__(message, field)
        self.rejection = rejection


class DeadlineExceeded(ServiceError):
    """The time allowed is over."""


class GenerationFailed(ServiceError):
    """The engine could not go on."""


class RequestGivenUp(ServiceError):
    """Engines were lost whenever they worked on it: it is not to be sent again."""
