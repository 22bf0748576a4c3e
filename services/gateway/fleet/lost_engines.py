"""The engines lost with one request since its last token: when to isolate the request, and when to give it up."""

from dataclasses import dataclass, field

from services.runtime.errors import RepeatedEngineLoss

# After this many losses the next engine computes the request in a batch of its own.
_MAX_LOST_IN_SHARED_BATCHES = 2


@dataclass
class LostEngines:
    """Counts engines that disconnected while they had the request. Drains, refusals and lost KV managers do not count.

    The request is given up only if an engine is lost after it reported to compute the request in isolation. If the
    request was still queued there, or the engine does not support isolation, another request may be the cause.
    """

    engine_ids: list[str] = field(default_factory=list)
    _runs_isolated: bool = False

    @property
    def isolated(self) -> bool:
        """Whether the next engine must compute the request with no other in its batch."""
        return len(self.engine_ids) >= _MAX_LOST_IN_SHARED_BATCHES

    def on_started(self, *, isolated: bool) -> None:
        """Record that the current engine has started the request."""
        self._runs_isolated = isolated

    def on_released(self) -> None:
        """Record that the current engine no longer has the request."""
        self._runs_isolated = False

    def on_token(self) -> None:
        """Reset the count: the current engine survived a step with the request."""
        self.engine_ids.clear()
        self._runs_isolated = False

    def add(self, engine_id: str) -> None:
        """Count the current engine as lost. Raises RepeatedEngineLoss."""
        self.engine_ids.append(engine_id)
        if self._runs_isolated:
            raise RepeatedEngineLoss(
                f"{len(self.engine_ids)} engines were lost one after the other while they had the request, "
                "the last of them with no other request in its batch"
            )
