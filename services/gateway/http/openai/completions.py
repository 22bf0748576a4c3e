"""Answers of /v1/completions."""

import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

from quire.v1 import gateway_pb2
from services.gateway.access.callers import Origin
from services.gateway.http.events import event, merged, to_json
from services.gateway.http.openai import answers, logprobs, requests
from services.gateway.http.openai.answers import Desk, Gathered
from services.gateway.http.openai.translation import completion_call
from services.runtime.errors import InvalidField, UnsupportedField
from services.runtime.http.server_sent_events import Events

_GOING_ON = b',"logprobs":null,"finish_reason":null}]'


class _Prompt(NamedTuple):
    """A prompt that the answer has something of."""

    text: str = ""
    token_ids: Sequence[int] = ()


class Completion:
    """One call of /v1/completions: a generation for each of its prompts."""

    def __init__(self, desk: Desk, origin: Origin, body: requests.CompletionRequest, request_id: str | None) -> None:
        """Translate the body. Raises InvalidField or UnsupportedField."""
        self.call = completion_call(body, request_id)
        self._desk = desk
        self._origin = origin
        self._body = body
        self._created = int(time.time())
        self._prompts = [_Prompt()] * len(self.call.generations)
        _check(body)

    async def whole(self) -> dict[str, Any]:
        """Generate everything, and return the answer. Raises a ServiceError."""
        await self._read_prompts()
        generations = [self._desk.generate(one, self._origin) for one in self.call.generations]
        gathered = await answers.gather_all(generations)
        return {
            **self._head(gathered[0].started.model),
            "choices": [choice for at, one in enumerate(gathered) for choice in self._choices(at, one)],
            "usage": answers.usage(one.finished.usage for one in gathered),
        }

    async def events(self) -> Events:
        """Yield the answer as it comes; the first, which may be empty, when it begins. Raises a ServiceError."""
        await self._read_prompts()
        each = [_Chunks(self, at) for at in range(len(self.call.generations))]
        streams = [
            answers.chunked(self._desk.generate(one, self._origin), chunks)
            for one, chunks in zip(self.call.generations, each, strict=True)
        ]
        async with aclosing(streams[0] if len(streams) == 1 else merged(streams)) as stream:
            async for one in stream:
                yield one
        if answers.includes_usage(self._body):
            usage = answers.usage(chunks.usage for chunks in each)
            yield event({**self._head(each[0].model), "choices": [], "usage": usage})

    async def _read_prompts(self) -> None:
        """Learn what the prompts are, where the answer has something of them."""
        body = self._body
        if not body.echo and body.prompt_logprobs is None:
            return
        for at, one in enumerate(self.call.generations):
            self._prompts[at] = await self._read(one)
            one.prompt.token_ids.ids[:] = self._prompts[at].token_ids
            if body.echo and body.logprobs is not None:
                one.output.prompt_logprobs = body.logprobs

    async def _read(self, request: gateway_pb2.GenerateRequest) -> _Prompt:
        token_ids = await self._desk.token_ids(request.model, request.prompt)
        if request.prompt.HasField("text"):
            return _Prompt(request.prompt.text, token_ids)
        text = await self._desk.text(gateway_pb2.DetokenizeRequest(model=request.model, token_ids=token_ids))
        return _Prompt(text, token_ids)

    def _head(self, model: str) -> dict[str, Any]:
        return {"id": self.call.name, "object": "text_completion", "created": self._created, "model": model}

    def _choices(self, at: int, gathered: Gathered) -> list[dict[str, Any]]:
        count = len(gathered.samples)
        return [{"index": at * count + sample, **self._choice(at, sample, gathered)} for sample in range(count)]

    def _choice(self, at: int, sample: int, gathered: Gathered) -> dict[str, Any]:
        said, body, prompt = gathered.samples[sample], self._body, self._prompts[at]
        choice: dict[str, Any] = {
            "text": prompt.text + said.text if body.echo else said.text,
            "logprobs": None,
            **answers.ending(gathered.finished.samples[sample]),
        }
        if body.logprobs is None and body.prompt_logprobs is None:
            return choice
        tokenizer = self._desk.tokenizer(gathered.started.model)
        of_prompt = [None, *gathered.prompt_logprobs]
        if body.logprobs is not None:
            token_ids = [*prompt.token_ids, *said.token_ids] if body.echo else said.token_ids
            its = [*of_prompt, *said.logprobs] if body.echo else said.logprobs
            choice["logprobs"] = logprobs.CompletionLogprobs(tokenizer).of(token_ids, its)
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = logprobs.of_prompt(tokenizer, prompt.token_ids, of_prompt)
        return choice


class _Chunks:
    """Events of one prompt's answers. What comes with every token is written beforehand, but for the text."""

    def __init__(self, completion: Completion, at: int) -> None:
        self._completion = completion
        self._at = at
        self.model = ""
        self.usage = gateway_pb2.Usage()
        self._end = answers.ChunkEnd(completion._body)

    def opened(self, started: gateway_pb2.Started) -> bytes:
        """See answers.Chunks."""
        completion, body, count = self._completion, self._completion._body, started.sampling.sample_count
        self.model = started.model
        self._first = self._at * count
        head = to_json(completion._head(started.model))[:-1]
        self._before = [
            f'data: {head},"choices":[{{"index":{self._first + sample},"text":'.encode() for sample in range(count)
        ]
        self._end.opened(started)
        self._going_on = _GOING_ON + self._end.written
        self._logprobs = None
        if body.logprobs is not None:
            tokenizer = completion._desk.tokenizer(started.model)
            self._logprobs = [logprobs.CompletionLogprobs(tokenizer) for _ in range(count)]
        if not body.echo:
            return b""
        text = to_json(completion._prompts[self._at].text).encode()
        return b"".join([before + text + self._going_on for before in self._before])

    def said(self, delta: gateway_pb2.Delta) -> bytes:
        """See answers.Chunks."""
        text = to_json(delta.text).encode()
        if self._end.said(delta):
            self._going_on = _GOING_ON + self._end.written
        if self._logprobs is None:
            return self._before[delta.sample] + text + self._going_on if delta.text else b""
        told = to_json(self._logprobs[delta.sample].of(delta.token_ids, delta.logprobs)).encode()
        return b"".join(
            [self._before[delta.sample], text, b',"logprobs":', told, b',"finish_reason":null}]', self._end.written]
        )

    def ended(self, finished: gateway_pb2.Finished) -> bytes:
        """See answers.Chunks."""
        self.usage = finished.usage
        chunks = []
        for sample, end in enumerate(finished.samples):
            ending = to_json(answers.ending(end))[1:-1].encode()
            chunks += [self._before[sample], b'"","logprobs":null,', ending, b"}]", self._end.written]
        return b"".join(chunks)


def _check(body: requests.CompletionRequest) -> None:
    """Refuse what goes together with nothing."""
    if body.stream and body.prompt_logprobs is not None:
        raise UnsupportedField("prompt_logprobs is not served for streams", "prompt_logprobs")
    if body.echo and body.logprobs is not None:
        if body.stream:
            raise UnsupportedField("echo with logprobs is not served for streams", "echo")
        if body.prompt_logprobs not in (None, body.logprobs):
            raise InvalidField("prompt_logprobs must be as many as logprobs where echo is asked for", "prompt_logprobs")
