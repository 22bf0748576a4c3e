"""Events between the gateway and its engines."""


class FleetObserver:
    """Receives events of requests at engines; these defaults ignore them."""

    def on_routed(self, model_name: str, engine_id: str, reason: str, cached_tokens: int) -> None:
        """A request was sent to this engine; `cached_tokens` of its prompt are expected in the prefix cache."""

    def on_failover(self, model_name: str, engine_id: str, reason: str) -> None:
        """A request was taken from this engine before its end, to continue at another one."""

    def on_isolated(self, model_name: str, engine_id: str) -> None:
        """A request with which engines were lost was sent to this one, to run with no other in its batch."""

    def on_given_up(self, model_name: str) -> None:
        """A request failed because several engines were lost with it, the last while the request was isolated."""

    def on_cancelled(self, model_name: str, engine_id: str, seconds: float) -> None:
        """The engine reported the end of a request `seconds` after the gateway had released it."""
