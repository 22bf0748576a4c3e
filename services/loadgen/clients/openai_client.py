"""Client of an OpenAI-compatible server over HTTP, with server-sent events.

It uses aiohttp, whose parser is written in C: an event takes 17 microseconds of CPU, with httpx 66.
"""

import json
import ssl
from array import array
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp

from services.loadgen.clients.target import RequestFailed, Server, Target, Unreachable
from services.loadgen.records import Record, Usage
from services.loadgen.workload.prompts import Prompt, PromptMaker
from services.runtime.tls import TLSFiles

_DESCRIBE = aiohttp.ClientTimeout(total=30)
_JSON = {"Content-Type": "application/json"}
_DATA = b"data:"
_DONE = b"[DONE]"
_MOST_OF_AN_ERROR = 300

Body = dict[str, Any]


class OpenAIClient:
    """A pool of connections to a server."""

    def __init__(self, target: Target, prompts: PromptMaker, clock: Callable[[], float]) -> None:
        self._target = target
        self._prompts = prompts
        self._clock = clock
        self._base = target.address.rstrip("/").removesuffix("/v1")
        self._server_name = target.server_name or None
        self._chat = target.kind == "chat"
        self._path = "/v1/chat/completions" if self._chat else "/v1/completions"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=_trust(target.tls)),
            headers={"Authorization": f"Bearer {target.api_key}"} if target.api_key else None,
            timeout=aiohttp.ClientTimeout(total=target.timeout_seconds),
        )

    async def describe(self) -> Server:
        """List the models, and select the named one or the first. Raises Unreachable."""
        url = f"{self._base}/v1/models"
        try:
            async with self._session.get(url, timeout=_DESCRIBE, server_hostname=self._server_name) as response:
                if response.status != 200:
                    raise Unreachable(f"{url}: {response.status}: {await _error(response)}")
                models = (await response.json())["data"]
            names = [one["id"] for one in models]
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Unreachable(f"{url}: {_reason(error)}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise Unreachable(f"{url}: the response is not a list of models") from error
        found = next((one for one in models if self._target.model in ("", one["id"])), None)
        if found is None:
            raise Unreachable(f"{url}: no model {self._target.model!r} among {names}")
        return Server(found["id"], None, found.get("max_model_len"))

    def prepare(self, prompt: Prompt, output_tokens: int) -> bytes:
        """Build the body of the request. The prompt of a chat is text with about one word per token."""
        body: Body = {"model": self._target.model, "stream": True, "stream_options": {"include_usage": True}}
        if self._chat:
            body |= {"messages": [{"role": "user", "content": self._prompts.text(prompt)}]}
            body |= {"max_completion_tokens": output_tokens}
        else:
            body |= {"prompt": self._prompts.token_ids(prompt), "max_tokens": output_tokens}
        if self._target.temperature is not None:
            body["temperature"] = self._target.temperature
        if self._target.ignore_eos:
            body["ignore_eos"] = True
        return json.dumps(body | self._target.extra_body).encode()

    async def send(self, request: bytes, record: Record) -> None:
        """Run one completion. Raises RequestFailed."""
        answer = _Answer(record)
        try:
            await self._stream(request, answer)
        except TimeoutError as error:
            limit = self._target.timeout_seconds
            raise RequestFailed("timeout", f"no end within {limit:g} seconds") from error
        except (aiohttp.ClientConnectorError, aiohttp.ServerDisconnectedError) as error:
            raise RequestFailed("unreachable", _reason(error)) from error
        except aiohttp.ClientError as error:
            raise RequestFailed("cut short", _reason(error)) from error
        except ValueError as error:
            raise RequestFailed("cut short", f"an event is not JSON: {error}") from error
        answer.finish()

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def _stream(self, request: bytes, answer: "_Answer") -> None:
        async with self._session.post(
            self._base + self._path, data=request, headers=_JSON, server_hostname=self._server_name
        ) as response:
            if response.status != 200:
                retry_after = retry_after_seconds(response.headers)
                raise RequestFailed(str(response.status), await _error(response), retry_after)
            async for event in events(response.content.iter_any()):
                if event == _DONE:
                    answer.done = True
                else:
                    answer.take(json.loads(event), self._clock())


class _Answer:
    """The answer of one request.

    A chunk with text counts as one token unless the server reports the count so far. If the server's last count is
    higher, chunks had several tokens: the total is spread over them evenly.
    """

    def __init__(self, record: Record) -> None:
        self.done = False
        self._record = record
        self._told_so_far = 0

    def take(self, chunk: Body, now: float) -> None:
        """Record one chunk. Raises RequestFailed if it is an error."""
        if error := chunk.get("error"):
            message = error.get("message", "") if isinstance(error, dict) else str(error)
            raise RequestFailed("cut short", message)
        usage = chunk.get("usage")
        if usage:
            self._record.usage = _usage(usage)
        if not any(_has_content(choice) for choice in chunk.get("choices") or ()):
            return
        tokens = 1
        if usage:
            tokens, self._told_so_far = usage["completion_tokens"] - self._told_so_far, usage["completion_tokens"]
        if tokens:
            self._record.add_tokens(tokens, now)

    def finish(self) -> None:
        """Check that the answer is complete, and spread the tokens. Raises RequestFailed."""
        if not self.done:
            raise RequestFailed("cut short", "the stream ended without [DONE]")
        total, times = self._record.usage.output_tokens, self._record.times
        if total is None or not times or total == self._record.output_tokens:
            return
        received = [(time, tokens) for time, tokens in zip(times, spread(total, len(times)), strict=True) if tokens]
        self._record.times = array("d", [time for time, _ in received])
        self._record.counts = array("l", [tokens for _, tokens in received])


async def events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event of a body in arbitrary chunks."""
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(_DATA):
                yield line.removeprefix(_DATA).strip()


def spread(total: int, places: int) -> list[int]:
    """Divide a total into `places` integers that differ by at most 1."""
    return [total * (place + 1) // places - total * place // places for place in range(places)]


def retry_after_seconds(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of Retry-After, which is a number or a date."""
    text = headers.get("Retry-After", "")
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return None


def _trust(files: TLSFiles | None) -> ssl.SSLContext | bool:
    """Return the TLS context; without files it trusts the system's authorities."""
    if files is None:
        return True
    context = ssl.create_default_context(cafile=files.ca)
    if files.certificate:
        context.load_cert_chain(files.certificate, files.key)
    return context


def _has_content(choice: Body) -> bool:
    """Return True if a choice holds tokens: text, content, reasoning, or a tool call."""
    delta = choice.get("delta") or {}
    names = ("content", "reasoning_content", "reasoning", "tool_calls")
    return bool(choice.get("text")) or any(delta.get(name) for name in names)


def _usage(usage: Body) -> Usage:
    details = usage.get("prompt_tokens_details") or {}
    return Usage(usage.get("prompt_tokens"), details.get("cached_tokens"), usage.get("completion_tokens"))


async def _error(response: aiohttp.ClientResponse) -> str:
    """Return the message of an error response."""
    text = await response.text(errors="replace")
    try:
        body = json.loads(text)
        return str(body["error"]["message"] if "error" in body else body.get("message", text))[:_MOST_OF_AN_ERROR]
    except (ValueError, KeyError, TypeError, AttributeError):
        return text[:_MOST_OF_AN_ERROR]


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {_DESCRIBE.total:g} seconds"
    return str(error) or type(error).__name__
