"""The engines that were lost with one request since it last gained a token: when it is isolated, and when given up."""

from dataclasses import dataclass, field

from services.runtime.errors import RequestGivenUp

# After so many the next engine computes it in a batch of its own.
_MOST_WITH_OTHERS = 2


@dataclass
class LostEngines:
    """Counts engines whose link broke while they had the request. Drains, refusals and lost KV managers do not count.

    A request is given up only when an engine is lost that has said that it computes it in isolation: where it still
    waited for that, or where an engine does not serve isolation, another request may be to blame.
    """

    engine_ids: list[str] = field(default_factory=list)
    _runs_isolated: bool = False

    @property
    def isolated(self) -> bool:
        """Whether the next engine is to compute it with no other request in its batch."""
        return len(self.engine_ids) >= _MOST_WITH_OTHERS

    def started(self, *, isolated: bool) -> None:
        """The present engine has begun it."""
        self._runs_isolated = isolated

    def left(self) -> None:
        """The present engine has nothing to do with it any more."""
        self._runs_isolated = False

    def gained_token(self) -> None:
        """It harms no engine, as far as can be said."""
        self.engine_ids.clear()
        self._runs_isolated = False

    def add(self, engine_id: str) -> None:
        """The link to the present engine broke. Raises RequestGivenUp."""
        self.engine_ids.append(engine_id)
        if self._runs_isolated:
            raise RequestGivenUp(
                f"{len(self.engine_ids)} engines were lost one after the other while they had the request, "
                "the last of them with no other request in its batch"
            )
