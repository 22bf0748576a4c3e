"""The engine of the small universe: it serves no gateway. Its requests are there from its start."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from engine.schedule.limits import Limits, Preemption
from quire.v1 import decoding_pb2, engine_pb2
from services.engine.gateway_link import GatewayLink
from services.engine.gateway_requests import Arrival
from simulation.network.connections import Network
from simulation.processes.attached import VOCABULARY, EngineSize, Incarnation
from simulation.processes.engine import STOP, EngineProcess
from simulation.runner import expected_tokens

ENGINE_ID = "e0"

# Three device blocks, of which each request needs at least two, and one host block.
SIZE = EngineSize(
    block_size=2,
    device_blocks=3,
    host_blocks=1,
    limits=Limits(token_budget=8, max_sequences=2, preemption=Preemption.RECOMPUTE),
    context_tokens=8,
    checksums=False,
)


class SmallRequest(NamedTuple):
    """A request: its id, its prompt, and how many tokens it may generate."""

    name: str
    prompt: tuple[int, ...]
    max_tokens: int

    def expected(self) -> list[int]:
        """Return the tokens of an undisturbed run."""
        return expected_tokens(self.prompt, 0, self.max_tokens, STOP, VOCABULARY)

    def submission(self) -> engine_pb2.Submission:
        """Return it as a gateway submits it."""
        message = engine_pb2.Submission(request_id=self.name, attempt=1, prompt_token_ids=self.prompt)
        message.stopping.max_tokens = self.max_tokens
        message.sampling.sample_count = 1
        return message


def requests_of(max_tokens: int) -> tuple[SmallRequest, SmallRequest]:
    """Return two requests whose prompts share their first block, and that need all three blocks together."""
    return SmallRequest("r0", (1, 2, 3), max_tokens), SmallRequest("r1", (1, 2), max_tokens)


class ReceivedTokens(GatewayLink):
    """A link that keeps what its engine sends: tokens, and the end of each request in words; empty if it succeeded."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}

    def put(self, output: engine_pb2.StepOutput) -> None:
        """Keep the output of a step."""
        for one in output.tokens:
            self.tokens.setdefault(one.request_id, []).extend(one.token_ids)
        for refused in output.refused:
            self.ends[refused.request_id] = f"refused: {refused.detail}"
        for finished in output.finished:
            reason = decoding_pb2.FinishReason.Name(finished.samples[0].reason)
            succeeded = reason in ("FINISH_REASON_STOP", "FINISH_REASON_LENGTH")
            self.ends[finished.request_id] = "" if succeeded else f"{reason}: {finished.detail}"


class SmallEngine(EngineProcess):
    """An engine with these requests."""

    def __init__(
        self, network: Network, clock: Callable[[], float], number: int, requests: tuple[SmallRequest, ...]
    ) -> None:
        """Start incarnation `number`."""
        super().__init__(network, clock, ENGINE_ID, Incarnation(number, number), SIZE, Path())
        self.requests = requests
        self.received = self.loop.run(ReceivedTokens)
        for request in self.requests:
            self.driver.submit(self.received, Arrival(request.submission(), clock()))

    @property
    def attached(self) -> bool:
        """Whether it can send block steps."""
        return self.link.ready and self.link.attached.is_set()

    @property
    def unfinished(self) -> tuple[str, ...]:
        """The requests that have not ended."""
        return tuple(request.name for request in self.requests if request.name not in self.received.ends)

    def _serve(self, folder: Path) -> None:
        """Serve no gateway."""
