"""What an engine's server puts into its loop, whoever made it."""

from collections.abc import Callable
from typing import Protocol

from engine.schedule.scheduler import Scheduler
from engine.schedule.step_plan import Runner
from services.engine.settings import EngineSettings


class Model(Protocol):
    """What the server has to know of a model."""

    @property
    def fingerprint(self) -> str:
        """Identifies what K and V depend on: engines of equal fingerprints compute the same for the same tokens."""

    @property
    def vocabulary_size(self) -> int:
        """Token ids are smaller than this."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a text."""

    @property
    def dtype(self) -> object:
        """Type of weights and cache, which its `str` names."""


class Parts(Protocol):
    """A model, the scheduler of its steps, and who executes them; ready to be connected to a block manager."""

    @property
    def loaded(self) -> Model:
        """The model."""

    @property
    def scheduler(self) -> Scheduler:
        """Decides what a step does; knows the capacity."""

    @property
    def runner(self) -> Runner:
        """Does it."""


# Makes them, on a thread: it may take seconds. Raises what makes the engine impossible.
Assembly = Callable[[EngineSettings], Parts]
