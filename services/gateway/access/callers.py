"""Who calls the gateway."""

from dataclasses import dataclass

from services.runtime.errors import PermissionDenied


@dataclass(frozen=True)
class Caller:
    """The one whose API key came with a call. `tenant` is empty where no keys are asked for.

    `best_priority` is the smallest, which is served first, that its requests may have; None: any.
    """

    tenant: str = ""
    operator: bool = True
    best_priority: int | None = None

    def require_operator(self) -> None:
        """Raise PermissionDenied unless the key is an operator's."""
        if not self.operator:
            raise PermissionDenied("the API key is not an operator's")

    def check_priority(self, priority: int) -> None:
        """Raise PermissionDenied where a request of this priority would be served before those that the key allows."""
        if self.best_priority is not None and priority < self.best_priority:
            raise PermissionDenied(
                f"priority is {priority}, the API key allows {self.best_priority} and larger: smaller is served first",
                "priority",
            )


ANONYMOUS = Caller()


@dataclass(frozen=True)
class Origin:
    """Where a request comes from: who calls, over `grpc` or `http`, and the trace that the call belongs to.

    `seconds_left` is the call's own deadline. `trace_parent` is what W3C's `traceparent` said, if anything.
    """

    caller: Caller = ANONYMOUS
    protocol: str = "grpc"
    trace_parent: str = ""
    seconds_left: float | None = None


DEFAULT_ORIGIN = Origin()
