"""Callers of the gateway, and the origin of their requests."""

from dataclasses import dataclass

from services.runtime.errors import PermissionDenied


@dataclass(frozen=True)
class Caller:
    """The owner of a call's API key. `tenant` is empty if no keys are needed.

    `best_priority` is the smallest priority that its requests may have; smaller is served first. None: any.
    """

    tenant: str = ""
    operator: bool = True
    best_priority: int | None = None

    def require_operator(self) -> None:
        """Raise PermissionDenied unless the key is an operator's."""
        if not self.operator:
            raise PermissionDenied("the API key must be an operator's")

    def check_priority(self, priority: int) -> None:
        """Raise PermissionDenied if the priority is better than the key allows."""
        if self.best_priority is not None and priority < self.best_priority:
            raise PermissionDenied(
                f"priority must be at least {self.best_priority} with this API key, not {priority}",
                "priority",
            )


ANONYMOUS = Caller()


@dataclass(frozen=True)
class Origin:
    """Origin of a request: its caller, its protocol (`grpc` or `http`), its trace, and its call's deadline.

    `trace_parent` is the value of W3C's `traceparent`, or empty. `seconds_left` is the time to the call's deadline.
    `client_request_id` is the client's own name for the request, which need not be unique, or empty.
    """

    caller: Caller = ANONYMOUS
    protocol: str = "grpc"
    trace_parent: str = ""
    seconds_left: float | None = None
    client_request_id: str = ""


DEFAULT_ORIGIN = Origin()
