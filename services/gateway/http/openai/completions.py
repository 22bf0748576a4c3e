"""Answers of /v1/completions."""

from collections.abc import Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

from quire.v1 import gateway_pb2
from services.gateway.access.callers import Origin
from services.gateway.http.events import merged, to_json
from services.gateway.http.openai import answers, logprobs, requests
from services.gateway.http.openai.answers import Chunks, Gathered, GenerationCall
from services.gateway.http.openai.translation import completion_call
from services.gateway.request_handler import RequestHandler
from services.runtime.errors import InvalidField, UnsupportedField
from services.runtime.http.server_sent_events import Events

_KIND = "text_completion"


class _Prompt(NamedTuple):
    """A prompt that the answer has something of."""

    text: str = ""
    token_ids: Sequence[int] = ()


class CompletionCall(GenerationCall):
    """One call of /v1/completions: a generation for each of its prompts."""

    body: requests.CompletionRequest

    def __init__(
        self, handler: RequestHandler, origin: Origin, body: requests.CompletionRequest, request_id: str | None
    ) -> None:
        """Translate the body. Raises InvalidField or UnsupportedField."""
        super().__init__(handler, origin, body, completion_call(body, request_id))
        self.prompts = [_Prompt()] * len(self.translated.generations)
        _check(body)

    async def whole(self) -> dict[str, Any]:
        """Generate everything, and return the answer. Raises a ServiceError."""
        await self._read_prompts()
        gathered = await answers.gather_all([self.generate(one) for one in self.translated.generations])
        return {
            **self.head(_KIND, gathered[0].started.model),
            "choices": [choice for at, one in enumerate(gathered) for choice in self._choices(at, one)],
            "usage": answers.usage(one.finished.usage for one in gathered),
        }

    async def events(self) -> Events:
        """Yield the answer as it comes; the first, which may be empty, when it begins. Raises a ServiceError."""
        await self._read_prompts()
        each = [_CompletionChunks(self, at) for at in range(len(self.prompts))]
        streams = [
            answers.chunked(self.generate(one), chunks)
            for one, chunks in zip(self.translated.generations, each, strict=True)
        ]
        async with aclosing(streams[0] if len(streams) == 1 else merged(streams)) as stream:
            async for one in stream:
                yield one
        for last in self.usage_chunk(_KIND, each):
            yield last

    async def _read_prompts(self) -> None:
        """Learn what the prompts are, where the answer has something of them."""
        body = self.body
        if not body.echo and body.prompt_logprobs is None:
            return
        for at, one in enumerate(self.translated.generations):
            self.prompts[at] = await self._read(one)
            one.prompt.token_ids.ids[:] = self.prompts[at].token_ids
            if body.echo and body.logprobs is not None:
                one.output.prompt_logprobs = body.logprobs

    async def _read(self, request: gateway_pb2.GenerateRequest) -> _Prompt:
        token_ids = await self.handler.token_ids(request.model, request.prompt)
        if request.prompt.HasField("text"):
            return _Prompt(request.prompt.text, token_ids)
        text = await self.handler.text(gateway_pb2.DetokenizeRequest(model=request.model, token_ids=token_ids))
        return _Prompt(text, token_ids)

    def _choices(self, at: int, gathered: Gathered) -> list[dict[str, Any]]:
        count = len(gathered.samples)
        return [{"index": at * count + sample, **self._choice(at, sample, gathered)} for sample in range(count)]

    def _choice(self, at: int, sample: int, gathered: Gathered) -> dict[str, Any]:
        said, body, prompt = gathered.samples[sample], self.body, self.prompts[at]
        choice: dict[str, Any] = {
            "text": prompt.text + said.text if body.echo else said.text,
            "logprobs": None,
            **answers.ending(gathered.finished.samples[sample]),
        }
        if body.logprobs is None and body.prompt_logprobs is None:
            return choice
        tokenizer = self.tokenizer(gathered.started.model)
        of_prompt = [None, *gathered.prompt_logprobs]
        if body.logprobs is not None:
            token_ids = [*prompt.token_ids, *said.token_ids] if body.echo else said.token_ids
            its = [*of_prompt, *said.logprobs] if body.echo else said.logprobs
            choice["logprobs"] = logprobs.CompletionLogprobsWriter(tokenizer).of(token_ids, its)
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = logprobs.of_prompt(tokenizer, prompt.token_ids, of_prompt)
        return choice


class _CompletionChunks(Chunks):
    """Events of one prompt's answers."""

    def __init__(self, completion: CompletionCall, at: int) -> None:
        super().__init__(completion, _KIND, "text", b',"logprobs":null,"finish_reason":null}]')
        self._completion = completion
        self._at = at

    def opened(self, started: gateway_pb2.Started, first: int = 0) -> bytes:
        """See Chunks."""
        completion, body, count = self._completion, self._completion.body, started.sampling.sample_count
        super().opened(started, first + self._at * count)
        self._logprobs = None
        if body.logprobs is not None:
            tokenizer = completion.tokenizer(started.model)
            self._logprobs = [logprobs.CompletionLogprobsWriter(tokenizer) for _ in range(count)]
        if not body.echo:
            return b""
        text = to_json(completion.prompts[self._at].text).encode()
        return b"".join([before + text + self._going_on for before in self._before])

    def said(self, delta: gateway_pb2.Delta) -> bytes:
        """See Chunks."""
        super().said(delta)
        text = to_json(delta.text).encode()
        if self._logprobs is None:
            return self._before[delta.sample] + text + self._going_on if delta.text else b""
        scores = to_json(self._logprobs[delta.sample].of(delta.token_ids, delta.logprobs)).encode()
        return b"".join(
            [self._before[delta.sample], text, b',"logprobs":', scores, b',"finish_reason":null}]', self._end.written]
        )

    def _ending(self, sample: int, end: gateway_pb2.SampleFinish) -> bytes:
        return self._last(sample, b'""', answers.ending(end))


def _check(body: requests.CompletionRequest) -> None:
    """Refuse what goes together with nothing."""
    if body.stream and body.prompt_logprobs is not None:
        raise UnsupportedField("prompt_logprobs is not served for streams", "prompt_logprobs")
    if body.echo and body.logprobs is not None:
        if body.stream:
            raise UnsupportedField("echo with logprobs is not served for streams", "echo")
        if body.prompt_logprobs not in (None, body.logprobs):
            raise InvalidField("prompt_logprobs must be as many as logprobs where echo is asked for", "prompt_logprobs")
