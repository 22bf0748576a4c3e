"""What happens between the gateway and its engines, for whoever counts it."""


class FleetObserver:
    """Receives what happens to requests at engines; these defaults ignore it."""

    def on_routed(self, model_name: str, engine_id: str, reason: str, cached_tokens: int) -> None:
        """A request was given to this engine, which should have so many of the prompt's tokens cached."""

    def on_failover(self, model_name: str, engine_id: str, reason: str) -> None:
        """A request left this engine before it had ended, for another one to go on with it."""

    def on_isolated(self, model_name: str, engine_id: str) -> None:
        """A request with which engines were lost was given to this one, to be computed with no other in its batch."""

    def on_given_up(self, model_name: str) -> None:
        """Engines were lost with a request for this model, one of them while it was isolated; it has failed."""

    def on_cancelled(self, model_name: str, engine_id: str, seconds: float) -> None:
        """The engine has ended a request, so many seconds after its client had left it."""
