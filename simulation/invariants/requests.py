"""What clients must receive: the tokens of an undisturbed run, and an end within the request's bounds."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.schedule.request import BeamSearch
from quire.v1 import gateway_pb2
from services.runtime.errors import DeadlineExceeded, Unavailable
from simulation.processes.attached import VOCABULARY
from simulation.processes.engine import STOP
from simulation.runner import expected_answers, expected_tokens
from simulation.scenario import PlannedRequest
from simulation.tokenizer import text_of

# Of the end of a request beyond its timeout, beside the time in which its gateway was stopped.
_LATE_SECONDS = 0.1

# Of the only errors for which a request may be given up as unavailable after its first token.
_UNAVAILABLE = ("without its KV manager", "others are withheld or pinned")


@dataclass
class Outcome:
    """What a client received: tokens and text of each sample, and how its request ended; None if it has not."""

    request: PlannedRequest
    begun: float
    gateway_stopped: float  # seconds in which its gateway had been stopped until then
    tokens: list[list[int]] = field(init=False)
    texts: list[str] = field(init=False)
    end: str | None = None
    error: Exception | None = None
    seconds: float = 0.0  # until the end, without those in which the gateway was stopped

    def __post_init__(self) -> None:
        self.tokens = [[] for _ in range(self.request.samples)]
        self.texts = [""] * self.request.samples

    def add(self, delta: gateway_pb2.Delta) -> None:
        """Add tokens and text of a sample."""
        self.tokens[delta.sample] += delta.token_ids
        self.texts[delta.sample] += delta.text

    def faults(self) -> list[str]:
        """Return what is wrong with a request that should have ended."""
        name, timeout = self.request.name, self.request.timeout
        if self.end is None:
            return [f"{name} has not ended"]
        found = [fault for sample in range(self.request.samples) for fault in self._sample_faults(sample)]
        if timeout is not None and self.seconds > timeout + _LATE_SECONDS:
            found.append(f"{name} ended after {self.seconds:.3f} s, and had {timeout} s")
        if isinstance(self.error, DeadlineExceeded) and timeout is None:
            found.append(f"{name} ended by a deadline that it does not have")
        expected = any(one in str(self.error) for one in _UNAVAILABLE)
        if isinstance(self.error, Unavailable) and any(self.tokens) and not expected:
            found.append(f"{name} was given up after its first token: {self.error}")
        return found

    def _sample_faults(self, sample: int) -> list[str]:
        request, tokens, text = self.request, self.tokens[sample], self.texts[sample]
        expected = texts_of(request)[sample]
        expected_text = text_of(expected)
        if request.stop and (stop := expected_text.find(request.stop)) >= 0:
            expected_text = expected_text[:stop]
        if tokens != expected[: len(tokens)] or not expected_text.startswith(text):
            return [f"{request.name}, sample {sample}: {tokens}, {text!r} in place of {expected}, {expected_text!r}"]
        if self.end == "finished" and text != expected_text:
            return [f"{request.name}, sample {sample}, ended with {text!r} in place of {expected_text!r}"]
        return []


def texts_of(request: PlannedRequest) -> list[Sequence[int]]:
    """Return the tokens of each sample or answer in an undisturbed run, where no stop string ends them."""
    if request.beams:
        return [text for text, _ in _answers(request, [])]
    return [
        expected_tokens(request.prompt, request.seed, request.max_tokens, STOP, VOCABULARY, sample)
        for sample in range(request.samples)
    ]


def computed_texts(request: PlannedRequest) -> list[Sequence[int]]:
    """Return all texts that an engine computes for a request, without the prompt."""
    searched: list[list[int]] = []
    if request.beams:
        _answers(request, searched)
    return [*texts_of(request), *searched]


def _answers(request: PlannedRequest, searched: list[list[int]]) -> list[tuple[list[int], float]]:
    search = BeamSearch(request.beams)
    return expected_answers(request.prompt, search, request.max_tokens, STOP, VOCABULARY, searched)
