"""Who calls the gateway."""

from dataclasses import dataclass

from services.errors import NotPermitted


@dataclass(frozen=True)
class Caller:
    """The one whose API key came with a call. `tenant` is empty where no keys are asked for."""

    tenant: str = ""
    operator: bool = True

    def require_operator(self) -> None:
        """Raise NotPermitted unless the key is an operator's."""
        if not self.operator:
            raise NotPermitted("the API key is not an operator's")


ANYONE = Caller()


@dataclass(frozen=True)
class Origin:
    """Where a request comes from: who calls, over `grpc` or `http`, and the trace that the call belongs to.

    `seconds_left` is the call's own deadline. `trace_parent` is what W3C's `traceparent` said, if anything.
    """

    caller: Caller = ANYONE
    protocol: str = "grpc"
    trace_parent: str = ""
    seconds_left: float | None = None


SOMEWHERE = Origin()
