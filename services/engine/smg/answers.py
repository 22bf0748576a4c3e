"""The answers to one request of smg, made from the outputs of the engine's steps.

A streamed answer has chunks with the tokens of one step, and for each sample a last message, which repeats the tokens
of the last chunk as vLLM's servicer does. An answer that is not streamed has only the last messages.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from smg_grpc_proto.generated import vllm_engine_pb2 as smg_pb

from quire.v1 import decoding_pb2, engine_pb2
from services.engine.smg.stop_strings import StopStrings

_REASONS: dict[int, str] = {
    decoding_pb2.FINISH_REASON_STOP: "stop",
    decoding_pb2.FINISH_REASON_LENGTH: "length",
    decoding_pb2.FINISH_REASON_CANCELLED: "abort",
}
_STOP_STRING = engine_pb2.SampleEnd(reason=decoding_pb2.FINISH_REASON_STOP)

_Scores = Sequence[decoding_pb2.TokenLogprobs]


class ScoredTokens(NamedTuple):
    """ScoredTokens of a sample with their log-probabilities, if requested."""

    token_ids: Sequence[int] = ()
    scores: _Scores = ()

    def first(self, count: int) -> "ScoredTokens":
        """Return the first tokens."""
        return ScoredTokens(self.token_ids[:count], self.scores[:count])

    def and_then(self, more: "ScoredTokens") -> "ScoredTokens":
        """Return these tokens and those behind them."""
        return ScoredTokens([*self.token_ids, *more.token_ids], [*self.scores, *more.scores])


class Sample:
    """One sample: its tokens so far, or the last ones if they are streamed, and the stop string that ended it."""

    def __init__(self, stops: StopStrings | None) -> None:
        """Start without tokens."""
        self.tokens = ScoredTokens()
        self.count = 0
        self.stop = ""
        self.ended = False
        self._stops = stops

    def add(self, tokens: ScoredTokens, *, streamed: bool) -> ScoredTokens:
        """Add tokens, and return those up to the end of a stop string."""
        if self._stops and (found := self._stops.push(tokens.token_ids)):
            self.stop, tokens = found.text, tokens.first(found.tokens)
        self.count += len(tokens.token_ids)
        self.tokens = tokens if streamed else self.tokens.and_then(tokens)
        return tokens


class Answers:
    """Makes the answers to one request. `to_end` are samples that the engine is to end, because of a stop string."""

    def __init__(self, request: smg_pb.GenerateRequest, prompt: Sequence[int], samples: Sequence[Sample]) -> None:
        """Start without outputs."""
        self._streamed = request.stream
        self._stop_tokens = frozenset(request.sampling_params.stop_token_ids)
        self._prompt = prompt
        self._has_prompt_scores = request.sampling_params.HasField("prompt_logprobs")
        self._prompt_scores: list[decoding_pb2.TokenLogprobs] = []
        self._samples = samples
        self._cached_tokens = 0
        self.to_end: list[int] = []

    def read(self, output: engine_pb2.StepOutput) -> Iterator[smg_pb.GenerateResponse]:
        """Yield the answers that an output of the engine makes, in order."""
        for started in output.started:
            self._cached_tokens = started.cached_tokens
        for scored in output.prompts:
            self._prompt_scores += scored.logprobs
        for one in output.tokens:
            sample = self._samples[one.sample]
            if not sample.ended:
                yield from self._read_tokens(one, sample)

    @property
    def complete(self) -> bool:
        """Whether each sample has its last message."""
        return all(sample.ended for sample in self._samples)

    def finish(self, ends: Iterable[engine_pb2.SampleEnd]) -> Iterator[smg_pb.GenerateResponse]:
        """Yield the last message of each sample that has none yet."""
        for index, end in enumerate(ends):
            if not self._samples[index].ended:
                yield self._complete(index, end)

    def _read_tokens(self, given: engine_pb2.SampleTokens, sample: Sample) -> Iterator[smg_pb.GenerateResponse]:
        is_first = not sample.count
        tokens = sample.add(ScoredTokens(given.token_ids, given.logprobs), streamed=self._streamed)
        if self._streamed:
            yield self._chunk(given.sample, tokens, is_first=is_first)
        if sample.stop:
            if not given.HasField("end"):
                self.to_end.append(given.sample)
            yield self._complete(given.sample, _STOP_STRING)
        elif given.HasField("end"):
            yield self._complete(given.sample, given.end)

    def _chunk(self, index: int, tokens: ScoredTokens, *, is_first: bool) -> smg_pb.GenerateResponse:
        chunk = smg_pb.GenerateStreamChunk(
            token_ids=tokens.token_ids,
            prompt_tokens=len(self._prompt),
            completion_tokens=len(tokens.token_ids),
            cached_tokens=self._cached_tokens,
            output_logprobs=_output_scores(tokens),
            input_logprobs=self._input_scores() if is_first else None,
            index=index,
        )
        return smg_pb.GenerateResponse(chunk=chunk)

    def _complete(self, index: int, end: engine_pb2.SampleEnd) -> smg_pb.GenerateResponse:
        sample = self._samples[index]
        sample.ended = True
        is_stop_token = end.HasField("stop_token_id") and end.stop_token_id in self._stop_tokens
        complete = smg_pb.GenerateComplete(
            output_ids=sample.tokens.token_ids,
            finish_reason=_REASONS.get(end.reason, "error"),
            prompt_tokens=len(self._prompt),
            completion_tokens=sample.count,
            cached_tokens=self._cached_tokens,
            output_logprobs=_output_scores(sample.tokens),
            input_logprobs=None if self._streamed and sample.count else self._input_scores(),
            index=index,
            matched_token_id=end.stop_token_id if is_stop_token else None,
            matched_stop_str=sample.stop or None,
        )
        return smg_pb.GenerateResponse(complete=complete)

    def _input_scores(self) -> smg_pb.InputLogProbs | None:
        """Return the log-probabilities of the prompt; its first token has none."""
        if not self._has_prompt_scores:
            return None
        values = [smg_pb.InputTokenLogProb(value=one.logprob) for one in self._prompt_scores]
        return smg_pb.InputLogProbs(
            token_logprobs=[smg_pb.InputTokenLogProb(), *values],
            token_ids=self._prompt,
            top_logprobs=[smg_pb.TopLogProbs(), *map(_top, self._prompt_scores)],
        )


def _output_scores(tokens: ScoredTokens) -> smg_pb.OutputLogProbs | None:
    if not tokens.scores:
        return None
    return smg_pb.OutputLogProbs(
        token_logprobs=[one.logprob for one in tokens.scores],
        token_ids=tokens.token_ids,
        top_logprobs=map(_top, tokens.scores),
    )


def _top(score: decoding_pb2.TokenLogprobs) -> smg_pb.TopLogProbs:
    return smg_pb.TopLogProbs(values=score.top_logprobs, token_ids=score.top_token_ids)
