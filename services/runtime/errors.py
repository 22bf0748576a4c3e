"""Errors of the services, beyond those of the cores. `services.runtime.statuses` has the status of each."""

from enum import Enum

FIELD_METADATA = "quire-field"
# Default when the time until capacity is free cannot be estimated.
_RETRY_SECONDS = 1.0


class RejectionReason(Enum):
    """Reason to reject a valid request."""

    MAX_REQUESTS = "max_requests"  # too many requests in flight
    MAX_QUEUED_TOKENS = "max_queued_tokens"  # too many tokens queued for engines
    TENANT_REQUESTS = "tenant_requests"  # too many requests of the tenant in flight
    TENANT_TOKENS = "tenant_tokens"  # the tenant's token limit
    ENGINE_QUEUE = "engine_queue"  # the queues of all engines are full
    CHAT_TEMPLATE = "chat_template"  # too many chats wait for their template
    DRAINING = "draining"
    UNAVAILABLE = "unavailable"  # no engine of the model accepts requests
    UNAUTHENTICATED = "unauthenticated"


class ServiceError(Exception):
    """Base of all errors that a service returns. `field` is the path of the invalid field, empty if there is none.

    `rejection` is the reason of a rejection, None for invalid requests and for admitted ones.
    """

    rejection: RejectionReason | None = None

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class InvalidField(ServiceError):
    """The value of a field is invalid."""


class ContextExceeded(InvalidField):
    """Prompt and output do not fit the model's context.

    `prompt_tokens` is the length of the prompt; not `is_exact`: a lower bound, because it was not tokenized.
    `context_tokens` is the model's context, or what the pool holds of it. The message has the words by which clients of
    OpenAI's API recognise it.
    """

    def __init__(
        self, message: str, field: str, prompt_tokens: int, context_tokens: int, *, is_exact: bool = True
    ) -> None:
        super().__init__(f"{message}: this model's maximum context length is {context_tokens} tokens", field)
        self.prompt_tokens = prompt_tokens
        self.context_tokens = context_tokens
        self.is_exact = is_exact


class UnsupportedField(ServiceError):
    """The field is not supported by this version."""


class UnexpectedMessage(ServiceError):
    """The message is not allowed at this point of a stream."""


class Unauthenticated(ServiceError):
    """The API key is missing, wrong or expired."""

    rejection = RejectionReason.UNAUTHENTICATED


class PermissionDenied(ServiceError):
    """The API key does not have the permission."""


class UnknownModel(ServiceError):
    """No engine serves the model."""


class RequestExists(ServiceError):
    """A live request has the same id."""


class UnknownPin(ServiceError):
    """No pin has this name."""


class PinExists(ServiceError):
    """Another prefix is pinned under the name."""


class PinTooLarge(ServiceError):
    """The pool is too small for this prefix in addition to the other pins and the live requests."""


class Overloaded(ServiceError):
    """A queue is full, or a tenant has reached its limit.

    `retry_seconds` is the estimated time until capacity is free.
    """

    def __init__(
        self,
        message: str,
        field: str = "",
        retry_seconds: float = _RETRY_SECONDS,
        rejection: RejectionReason = RejectionReason.ENGINE_QUEUE,
    ) -> None:
        super().__init__(message, field)
        self.retry_seconds = retry_seconds
        self.rejection = rejection


class SlowClient(ServiceError):
    """The client did not read its stream in time."""


class Unavailable(ServiceError):
    """The service is draining, or another service is unavailable."""

    def __init__(self, message: str, field: str = "", rejection: RejectionReason | None = None) -> None:
        super().__init__(message, field)
        self.rejection = rejection


class DeadlineExceeded(ServiceError):
    """The request's deadline has passed."""


class GenerationFailed(ServiceError):
    """The engine failed to generate."""


class RepeatedEngineLoss(ServiceError):
    """Several engines were lost while they computed the request, so it is not sent to another one."""
