"""What an engine has to do, and what it has cached, as far as its gateway can know."""

from quire.v1 import engine_pb2 as pb
from services.gateway.fleet.prefix_tracker import PrefixTracker
from services.gateway.fleet.routing import RecentLoad


class LoadEstimate:
    """What this gateway has given an engine, and what the engine has reported since it came up."""

    def __init__(self, seconds: float) -> None:
        """Remember work for about so many seconds."""
        self.recent = RecentLoad(seconds)
        self.sent = PrefixTracker(0)
        self.requests_of_others = 0  # when the engine last reported
        self._reported_tokens = 0
        self._given_tokens = 0

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens that the engine had still to compute when it last reported, and those it was given since."""
        return self._reported_tokens + self._given_tokens

    def give(self, now: float, tokens: int) -> None:
        """Count so many prompt tokens as given to the engine. `now` is in seconds."""
        self.recent.add(now, tokens)
        self._given_tokens += tokens

    def report(self, load: pb.EngineLoad, own_requests: int) -> None:
        """Take the engine's own report; so many of its requests are this gateway's."""
        self._reported_tokens, self._given_tokens = load.prompt_tokens, 0
        self.requests_of_others = max(0, load.running + load.waiting - own_requests)

    def begin_session(self, device_blocks: int) -> None:
        """The engine has come up, with a pool of so many blocks: nothing is cached there."""
        self.sent = PrefixTracker(device_blocks)

    def end_session(self) -> None:
        """The engine is gone. What it was given lately still counts, if it comes back."""
        self._reported_tokens = self.requests_of_others = 0
