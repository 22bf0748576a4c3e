"""What clients must receive: the tokens of an undisturbed run, and an end within the request's bounds."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.schedule.request import BeamSearch
from quire.v1 import decoding_pb2, gateway_pb2
from services.runtime.errors import ServiceError
from simulation.invariants.failures import Circumstances, failure_fault
from simulation.processes.attached import VOCABULARY
from simulation.processes.engine import STOP
from simulation.runner import expected_answers, expected_tokens
from simulation.scenario import PlannedRequest
from simulation.tokenizer import text_of

# Of the end of a request beyond its timeout, beside the time in which its gateway was stopped.
_LATE_SECONDS = 0.1


class _Answer(NamedTuple):
    """What a client must receive of one sample."""

    tokens: Sequence[int]
    text: str
    finish: gateway_pb2.SampleFinish


@dataclass
class Outcome:
    """What a client received: tokens and text of each sample, and how its request ended; None if it has not.

    `failed_steps` were made to fail before it began; `lost_engines` were lost with it before its last token.
    """

    request: PlannedRequest
    begun: float
    gateway_stopped: float  # seconds in which its gateway had been stopped until then
    failed_steps: int
    lost_engines: int = 0
    tokens: list[list[int]] = field(init=False)
    texts: list[str] = field(init=False)
    started: list[gateway_pb2.Started] = field(default_factory=list)
    finished: list[gateway_pb2.Finished] = field(default_factory=list)
    end: str | None = None
    error: ServiceError | None = None
    circumstances: Circumstances | None = None  # of an error
    seconds: float = 0.0  # until the end, without those in which the gateway was stopped

    def __post_init__(self) -> None:
        self.tokens = [[] for _ in range(self.request.samples)]
        self.texts = [""] * self.request.samples

    def add(self, response: gateway_pb2.GenerateResponse) -> None:
        """Add what the client received."""
        match response.WhichOneof("event"):
            case "started":
                self.started.append(response.started)
            case "delta":
                self.tokens[response.delta.sample] += response.delta.token_ids
                self.texts[response.delta.sample] += response.delta.text
            case "finished":
                self.finished.append(response.finished)

    def faults(self) -> list[str]:
        """Return what is wrong with a request that should have ended."""
        name, timeout = self.request.name, self.request.timeout
        if self.end is None:
            return [f"{name} has not ended"]
        answers = _expected(self.request)
        found = [fault for sample, one in enumerate(answers) for fault in self._sample_faults(sample, one)]
        if timeout is not None and self.seconds > timeout + _LATE_SECONDS:
            found.append(f"{name} ended after {self.seconds:.3f} s, and had {timeout} s")
        if self.error is not None:
            assert self.circumstances is not None, "they are set with the error"
            if fault := failure_fault(self.request, self.error, self.circumstances):
                found.append(f"{name} failed {fault}: {type(self.error).__name__}: {self.error}")
        return [*found, *self._finish_faults(answers)] if self.end == "finished" else found

    def _sample_faults(self, sample: int, answer: _Answer) -> list[str]:
        tokens, text = self.tokens[sample], self.texts[sample]
        is_whole = self.end == "finished"
        expected = answer.tokens if is_whole else answer.tokens[: len(tokens)]
        expected_text = answer.text if is_whole else answer.text[: len(text)]
        if tokens == expected and text == expected_text:
            return []
        received = f"{self.request.name}, sample {sample}: {tokens}, {text!r}"
        return [f"{received} in place of {answer.tokens}, {answer.text!r}; {self.end}"]

    def _finish_faults(self, answers: Sequence[_Answer]) -> list[str]:
        name, prompt = self.request.name, len(self.request.prompt)
        if (len(self.started), len(self.finished)) != (1, 1):
            return [f"{name} finished, but it has {len(self.started)} Started and {len(self.finished)} Finished"]
        started, usage = self.started[0], self.finished[0].usage
        found = [
            f"{name}, sample {sample}: {_words(finish)} in place of {_words(answer.finish)}"
            for sample, (finish, answer) in enumerate(zip(self.finished[0].samples, answers, strict=True))
            if _words(finish) != _words(answer.finish)
        ]
        counts = started.prompt_tokens, usage.prompt_tokens, usage.generated_tokens
        expected = prompt, prompt, sum(len(answer.tokens) for answer in answers)
        if counts != expected:
            found.append(f"{name} counts {counts} in place of {expected}")
        if not 0 <= usage.cached_tokens == started.cached_tokens < prompt:
            found.append(f"{name} had {started.cached_tokens} cached tokens, then {usage.cached_tokens}, of {prompt}")
        return found


def _words(finish: gateway_pb2.SampleFinish) -> str:
    """Return why a sample ended. The scores of a search are in another place."""
    reason = decoding_pb2.FinishReason.Name(finish.reason)
    stop = f", token {finish.stop_token_id}" if finish.HasField("stop_token_id") else ""
    return f"{reason}{stop}, {finish.stop_string!r}"


def _expected(request: PlannedRequest) -> list[_Answer]:
    return [_answer(request, tokens) for tokens in texts_of(request)]


def _answer(request: PlannedRequest, tokens: Sequence[int]) -> _Answer:
    finish = gateway_pb2.SampleFinish
    stop = next((at for at, token in enumerate(tokens) if request.stop and text_of([token]) == request.stop), None)
    if stop is not None:
        end = finish(reason=decoding_pb2.FINISH_REASON_STOP, stop_string=request.stop)
        return _Answer(tokens[: stop + 1], text_of(tokens[:stop]), end)
    if tokens and tokens[-1] in STOP:
        return _Answer(
            tokens, text_of(tokens), finish(reason=decoding_pb2.FINISH_REASON_STOP, stop_token_id=tokens[-1])
        )
    return _Answer(tokens, text_of(tokens), finish(reason=decoding_pb2.FINISH_REASON_LENGTH))


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
