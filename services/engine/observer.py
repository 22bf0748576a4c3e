"""What an engine at work reports to those that measure it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from engine.schedule.stats import SchedulerTotals


@dataclass(frozen=True)
class EngineFigures:
    """An engine at the end of a turn of its loop. `sessions` counts how often its pool was attached.

    `uncomputed_tokens` are those of prompts that live requests have still to compute. `deferred` are the waiting
    requests that room would not help now.
    """

    running: int
    waiting: int
    totals: SchedulerTotals
    uncomputed_tokens: int = 0
    available_blocks: int = 0
    sessions: int = 0
    deferred: int = 0


class StepFigures(NamedTuple):
    """A step that was executed: how many tokens it computed, and where its time went, in seconds.

    `seconds` is what the model and the sampling took, `forward` and `sample`. `plan` went before that into laying it
    out and into asking for blocks, `wait` into waiting for the KV manager with nothing else to do, and `publish` after
    it into telling what it brought. Where steps are launched ahead, the next one runs during `plan` and `publish`.
    """

    tokens: int
    seconds: float
    plan: float
    wait: float
    forward: float
    sample: float
    publish: float


class EngineObserver:
    """Receives when an engine begins to serve, and its steps; this default ignores them."""

    def began(self, model_name: str, engine_id: str, figures: Callable[[], EngineFigures]) -> None:
        """The model is loaded. `figures` can be called from now on, on the event loop."""

    def on_step(self, step: StepFigures) -> None:
        """A step was executed. Called on the engine's thread."""
