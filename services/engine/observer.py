"""What can be heard of an engine at work, by whoever measures it."""

from collections.abc import Callable
from dataclasses import dataclass

from engine.scheduler import SchedulerTotals


@dataclass(frozen=True)
class EngineFigures:
    """An engine at the end of a turn of its loop. `sessions` counts how often its pool was attached.

    `uncomputed_tokens` are those of prompts that live requests have still to compute.
    """

    running: int
    waiting: int
    totals: SchedulerTotals
    uncomputed_tokens: int = 0
    available_blocks: int = 0
    sessions: int = 0


class EngineObserver:
    """Hears when an engine begins to serve, and of its steps. This one does nothing with it."""

    def began(self, model_name: str, engine_id: str, figures: Callable[[], EngineFigures]) -> None:
        """The model is loaded. `figures` can be called from now on, on the event loop."""

    def stepped(self, seconds: float) -> None:
        """A step was executed in so many seconds. Called on the engine's thread."""
