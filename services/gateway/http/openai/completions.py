"""Responses of /v1/completions."""

import re
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, NamedTuple

from quire.v1 import gateway_pb2
from quire.v1.decoding_pb2 import TokenLogprobs
from services.gateway.access.callers import Origin
from services.gateway.http.events import merge, to_json
from services.gateway.http.openai import generation_output, logprobs, requests, text_offsets
from services.gateway.http.openai.generation_output import (
    ChunkWriter,
    CollectedGeneration,
    CollectedSample,
    GenerationCall,
)
from services.gateway.http.openai.text_offsets import PlacedToken, StreamedTokens, TextOffsets
from services.gateway.http.openai.translation import completion_call
from services.gateway.request_handler import RequestHandler, Responses
from services.gateway.text.tokenizer import Tokenizer
from services.runtime.errors import InvalidField, UnsupportedField
from services.runtime.http.server_sent_events import Events

_KIND = "text_completion"
_IN_PROMPT = re.compile(r"\bprompt(?:\.text|\.token_ids(?:\.ids)?)?(?![\w.])")


class _Prompt(NamedTuple):
    """A prompt, read if the response includes a part of it."""

    text: str = ""
    token_ids: Sequence[int] = ()
    given_as_text: bool = False


class CompletionCall(GenerationCall):
    """One request to /v1/completions: one generation for each prompt."""

    body: requests.CompletionRequest

    def __init__(self, handler: RequestHandler, origin: Origin, body: requests.CompletionRequest) -> None:
        """Translate the body. Raises InvalidField or UnsupportedField."""
        super().__init__(handler, origin, body, completion_call(body))
        self.prompts = [_Prompt()] * len(self.translated.generations)
        if len(self.prompts) > 1:
            handler.check_count(self.translated.generations, origin)
        _check_compatible(body)

    async def complete(self) -> dict[str, Any]:
        """Generate the complete response. Raises ServiceError."""
        await self._read_prompts()
        collected = await generation_output.collect_all([self._generate(at) for at in range(len(self.prompts))])
        return {
            **self.base_fields(_KIND, collected[0].started.model, collected[0].started.warnings),
            "choices": [choice for at, one in enumerate(collected) for choice in self._choices(at, one)],
            "usage": generation_output.usage(one.finished.usage for one in collected),
        }

    async def render(self) -> list[dict[str, Any]]:
        """Return the token ids of each prompt, without a generation. Raises ServiceError."""
        prompts = []
        for at, request in enumerate(self.translated.generations):
            with self._locating(at):
                prompts.append(await self.rendered(request))
        return prompts

    async def stream(self) -> Events:
        """Yield the chunks of the response, the first (which may be empty) at the start. Raises ServiceError."""
        await self._read_prompts()
        writers = [_CompletionChunkWriter(self, at) for at in range(len(self.prompts))]
        streams = [generation_output.stream_chunks(self._generate(at), writer) for at, writer in enumerate(writers)]
        async with aclosing(streams[0] if len(streams) == 1 else merge(streams)) as chunks:
            async for chunk in chunks:
                yield chunk
        for last in self.usage_chunk(_KIND, writers):
            yield last

    def generate(self, request: gateway_pb2.GenerateRequest) -> Responses:
        """Start the generation of one prompt. Of a limit that the client has not set, what fits is generated."""
        is_default = self.body.max_tokens is None and self.body.max_completion_tokens is None
        return self.handler.generate(request, self.origin, caps_output=is_default)

    async def _generate(self, at: int) -> Responses:
        async with aclosing(self.generate(self.translated.generations[at])) as responses:
            with self._locating(at):
                async for response in responses:
                    yield response

    @contextmanager
    def _locating(self, at: int) -> Iterator[None]:
        """Name the prompt at fault, if the client sent a list of prompts."""
        try:
            yield
        except InvalidField as error:
            given = self.body.prompt
            if isinstance(given, str) or isinstance(given[0], int) or not _IN_PROMPT.match(error.field):
                raise
            texts = (error.field, str(error))
            error.field, message = (_IN_PROMPT.sub(f"prompt[{at}]", text, count=1) for text in texts)
            error.args = (message,)
            raise

    async def _read_prompts(self) -> None:
        """Tokenize or detokenize the prompts, if the response includes them."""
        body = self.body
        if not body.echo and body.prompt_logprobs is None:
            return
        for at, one in enumerate(self.translated.generations):
            with self._locating(at):
                self.prompts[at] = await self._read(one)
            one.ClearField("truncate_prompt_tokens")
            one.prompt.token_ids.ids[:] = self.prompts[at].token_ids
            if body.echo and body.logprobs is not None:
                one.output.prompt_logprobs = body.logprobs

    async def _read(self, request: gateway_pb2.GenerateRequest) -> _Prompt:
        token_ids = await self.handler.prompt_ids(request, self.origin.caller)
        if request.prompt.HasField("text") and not request.HasField("truncate_prompt_tokens"):
            return _Prompt(request.prompt.text, token_ids, given_as_text=True)
        text = await self.handler.text(gateway_pb2.DetokenizeRequest(model=request.model, token_ids=token_ids))
        return _Prompt(text, token_ids)

    def _choices(self, at: int, collected: CollectedGeneration) -> list[dict[str, Any]]:
        count = len(collected.samples)
        return [{"index": at * count + sample, **self._choice(at, sample, collected)} for sample in range(count)]

    def _choice(self, at: int, sample: int, collected: CollectedGeneration) -> dict[str, Any]:
        output, body, prompt = collected.samples[sample], self.body, self.prompts[at]
        choice: dict[str, Any] = {
            "text": prompt.text + output.text if body.echo else output.text,
            "logprobs": None,
            **generation_output.finish_fields(collected.finished.samples[sample], body),
            **self.token_ids("prompt_token_ids", collected.started.prompt_token_ids),
            **self.token_ids("token_ids", output.token_ids),
        }
        if body.logprobs is None and body.prompt_logprobs is None:
            return choice
        tokenizer = self.tokenizer(collected.started.model)
        prompt_logprobs = [None, *collected.prompt_logprobs]
        if body.logprobs is not None:
            token_ids = [*prompt.token_ids, *output.token_ids] if body.echo else output.token_ids
            scores = [*prompt_logprobs, *output.logprobs] if body.echo else output.logprobs
            offsets = self._offsets(tokenizer, prompt, output)
            choice["logprobs"] = logprobs.for_completion(tokenizer, token_ids, scores, offsets)
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = logprobs.for_prompt(tokenizer, prompt.token_ids, prompt_logprobs)
        return choice

    def _offsets(self, tokenizer: Tokenizer, prompt: _Prompt, output: CollectedSample) -> list[int]:
        """Return where the tokens of a choice begin in its text."""
        special = self.body.skip_special_tokens is False
        of_output = text_offsets.output_offsets(tokenizer, output.text, output.token_ids, special_tokens=special)
        if not self.body.echo:
            return of_output
        return [*_prompt_offsets(tokenizer, prompt), *(len(prompt.text) + offset for offset in of_output)]


class _CompletionChunkWriter(ChunkWriter):
    def __init__(self, completion: CompletionCall, at: int) -> None:
        super().__init__(completion, _KIND, "text", b',"logprobs":null,"finish_reason":null}]')
        self._completion = completion
        self._at = at
        self._is_scored = completion.body.logprobs is not None
        self._is_plain = not (self._is_scored or completion.body.return_token_ids)
        self._prompt_scores: list[TokenLogprobs | None] = [None]  # so far

    def write_started(self, started: gateway_pb2.Started, first: int = 0) -> bytes:
        """See ChunkWriter."""
        completion, body, count = self._completion, self._completion.body, started.sampling.sample_count
        super().write_started(started, first + self._at * count)
        self._tokenizer = completion.tokenizer(started.model)
        special, start = body.skip_special_tokens is False, len(completion.prompts[self._at].text) if body.echo else 0
        self._tokens = [
            StreamedTokens(TextOffsets(self._tokenizer, special_tokens=special, start=start), start)
            for _ in range(count)
        ]
        if not body.echo and not body.return_token_ids:
            return b""
        prompt = completion.token_ids_part("prompt_token_ids", started.prompt_token_ids)
        self._own = prompt + completion.token_ids_part("token_ids", ())
        if body.echo and self._is_scored:
            return self._write_scored_prompt()
        return self._write_prompt(completion.prompts[self._at].text if body.echo else "", b"null")

    def write_prompt_scores(self, part: gateway_pb2.PromptLogprobs, /) -> bytes:
        """See ChunkWriter."""
        self._prompt_scores += part.logprobs
        return self._write_scored_prompt()

    def write_delta(self, delta: gateway_pb2.Delta) -> bytes:
        """See ChunkWriter."""
        super().write_delta(delta)
        if self._is_plain:
            before = self._prefixes[delta.sample]
            return before + to_json(delta.text).encode() + self._continuation if delta.text else b""
        if not self._is_scored:
            return self._chunk(delta.sample, delta.text, b"null", delta.token_ids)
        placed = self._tokens[delta.sample].add(delta.text, delta.token_ids, delta.logprobs)
        return self._write_placed(delta.sample, delta.text, placed) if delta.text or placed else b""

    def _write_finish(self, sample: int, end: gateway_pb2.SampleFinish) -> bytes:
        rest = self._tokens[sample].finish()
        chunk = self._write_placed(sample, "", rest) if rest else b""
        return chunk + self._last_chunk(sample, b'""', generation_output.finish_fields(end, self._completion.body))

    def _write_scored_prompt(self) -> bytes:
        """Encode the prompt once it is scored."""
        prompt = self._completion.prompts[self._at]
        if len(self._prompt_scores) < len(prompt.token_ids):
            return b""
        offsets = _prompt_offsets(self._tokenizer, prompt)
        scores = logprobs.for_completion(self._tokenizer, prompt.token_ids, self._prompt_scores, offsets)
        return self._write_prompt(prompt.text, to_json(scores).encode())

    def _write_prompt(self, text: str, scores: bytes) -> bytes:
        rest = to_json(text).encode() + self._choice_end(scores, self._own)
        return b"".join([before + rest for before in self._prefixes])

    def _write_placed(self, sample: int, text: str, placed: Sequence[PlacedToken]) -> bytes:
        token_ids = [token.token_id for token in placed]
        offsets = [token.offset for token in placed]
        scores = logprobs.for_completion(self._tokenizer, token_ids, [token.scores for token in placed], offsets)
        return self._chunk(sample, text, to_json(scores).encode(), token_ids)

    def _chunk(self, sample: int, text: str, scores: bytes, token_ids: Sequence[int]) -> bytes:
        own = self._completion.token_ids_part("token_ids", token_ids)
        return self._prefixes[sample] + to_json(text).encode() + self._choice_end(scores, own)

    def _choice_end(self, scores: bytes, own: bytes) -> bytes:
        """Encode the rest of a chunk after the text. `own` are further fields of the choice."""
        return b',"logprobs":%b,"finish_reason":null%b}]%b' % (scores, own, self._suffix.value)


def _prompt_offsets(tokenizer: Tokenizer, prompt: _Prompt) -> list[int]:
    return text_offsets.prompt_offsets(tokenizer, prompt.text, prompt.token_ids, given_as_text=prompt.given_as_text)


def _check_compatible(body: requests.CompletionRequest) -> None:
    if body.stream and body.prompt_logprobs is not None:
        raise UnsupportedField("prompt_logprobs is not supported with stream", "prompt_logprobs")
    if body.echo and body.logprobs is not None and body.prompt_logprobs not in (None, body.logprobs):
        raise InvalidField(
            f"prompt_logprobs must equal logprobs ({body.logprobs}) with echo, not {body.prompt_logprobs}",
            "prompt_logprobs",
        )
