"""A gateway's estimate of one engine's load and cached prefixes."""

from typing import NamedTuple

from quire.v1 import engine_pb2 as pb
from services.gateway.fleet.prefix_tracker import PrefixTracker
from services.gateway.fleet.routing import RecentLoad


class CurrentLoad(NamedTuple):
    """Load of one engine, over all its gateways.

    `waiting` of its `requests` have no blocks yet. `tokens` are those that fit in the blocks of requests, and prompt
    tokens still to be computed.
    """

    requests: int
    waiting: int
    tokens: int


class LoadEstimate:
    """Combines what this gateway sent to an engine with the engine's reports since it connected."""

    def __init__(self, window_seconds: float) -> None:
        """Recent load decays over `window_seconds`."""
        self.recent = RecentLoad(window_seconds)
        self.prefixes = PrefixTracker(0)
        self.requests_of_others = 0  # of other gateways, in the latest report
        self.waiting = 0  # requests without blocks, in the latest report
        self.available_blocks = 0  # in the latest report
        self._reported_tokens = 0
        self._sent_tokens = 0  # since the latest report

    @property
    def pending_prefill_tokens(self) -> int:
        """Prompt tokens not computed yet: those in the engine's latest report, and those sent since."""
        return self._reported_tokens + self._sent_tokens

    def on_sent(self, now: float, tokens: int) -> None:
        """Count prompt tokens that the engine must compute. `now` is in seconds."""
        self.recent.add(now, tokens)
        self._sent_tokens += tokens

    def on_report(self, load: pb.EngineLoad, own_requests: int) -> None:
        """Apply the engine's report; `own_requests` of its requests are this gateway's."""
        self._reported_tokens, self._sent_tokens = load.prompt_tokens, 0
        self.waiting, self.available_blocks = load.waiting, load.available_blocks
        self.requests_of_others = max(0, load.running + load.waiting - own_requests)

    def on_connected(self, device_blocks: int) -> None:
        """Start with an empty prefix cache of `device_blocks` blocks."""
        self.prefixes = PrefixTracker(device_blocks)

    def on_disconnected(self) -> None:
        """Drop the reported load. Recent load stays, in case the engine reconnects."""
        self._reported_tokens = self.requests_of_others = self.waiting = self.available_blocks = 0
