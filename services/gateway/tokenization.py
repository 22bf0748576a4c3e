"""Tokenizes the prompts of requests: short texts at once, others in threads, so that other streams do not wait.

Chats are rendered two of each model at a time, with a first share of processor time. Those that need more are rendered
again, one of each model at a time, beside the others. A chat waits for at most 10 s in all and is refused then, or at
once if too many wait. Tenants take turns.

A text of megabytes takes seconds, and a hundred times its size in memory while it is tokenized. Therefore a prompt that
cannot fit is refused by its size, at most two large texts are tokenized at once, and the memory goes back to the system
afterwards: glibc would keep it for the thread that has allocated it, once for each thread.
"""

import asyncio
import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from quire.v1 import gateway_pb2
from services.gateway.call_results import check_results
from services.gateway.fleet.fleet import ServedModel
from services.gateway.request_checks import check_ids, check_prompt
from services.gateway.text.chat_template import ChatTemplateError
from services.gateway.text.conversation import conversation_of
from services.gateway.text.rendering.shares import FirstShareUsed, share_of_chat
from services.gateway.text.rendering.turns import MAX_WAIT_SECONDS, Turns
from services.gateway.text.tokenizer import RenderedChat, TextTooLong, Tokenizer
from services.runtime.errors import ContextExceeded, InvalidField

_MAX_INLINE_BYTES = 4096
_LARGE_BYTES = 64 * 1024
_LARGE_AT_ONCE = 2
_FIRST_AT_ONCE, _LONG_AT_ONCE = 2, 1  # of each model
_MOST_WAITING_FIRST, _MOST_WAITING_LONG = 1024, 64
_CHAT_THREADS = 16
_Result = TypeVar("_Result")
# Absent in other libraries than glibc.
_RETURN_FREED_MEMORY = getattr(ctypes.CDLL(None), "malloc_trim", None)


@dataclass(frozen=True)
class _TurnsOfModel:
    """The turns of its chats with a first share of processor time, and of those that need more."""

    first: Turns = field(default_factory=lambda: Turns(_FIRST_AT_ONCE, _MOST_WAITING_FIRST))
    long: Turns = field(default_factory=lambda: Turns(_LONG_AT_ONCE, _MOST_WAITING_LONG, refuses_early=True))


class PromptTokenizer:
    """Tokenizes prompts with the tokenizers of their models."""

    def __init__(self) -> None:
        self._large = ThreadPoolExecutor(_LARGE_AT_ONCE, "tokenize")
        self._chats = ThreadPoolExecutor(_CHAT_THREADS, "render")
        self._long_chats = ThreadPoolExecutor(_CHAT_THREADS, "render-long")
        self._turns = WeakKeyDictionary[Tokenizer, _TurnsOfModel]()

    async def token_ids(
        self,
        model: ServedModel,
        prompt: gateway_pb2.Prompt,
        most: int | None = None,
        *,
        open_turn: bool = True,
        tenant: str = "",
    ) -> list[int]:
        """Return a prompt's token ids. False as `open_turn` leaves out the start of an assistant's turn.

        A text with surely more than `most` tokens is not tokenized; other results may be longer, too.
        Raises InvalidField, and Overloaded if too many chats of the model are waiting.
        """
        check_prompt(prompt)
        if prompt.WhichOneof("kind") == "token_ids":
            check_ids(prompt.token_ids.ids, "prompt.token_ids.ids", model.description().vocabulary_size)
            return list(prompt.token_ids.ids)
        try:
            if prompt.WhichOneof("kind") == "text":
                return await self._of_text(model.tokenizer, prompt.text, prompt.ByteSize(), most)
            check_results(prompt.chat)
            rendering = _Rendering(model.tokenizer, prompt.chat, most, open_turn)
            return await self._of_chat(model.tokenizer, rendering, tenant)
        except ChatTemplateError as error:
            field = f"prompt.chat{error.field}"
            raise InvalidField(f"{field}: {error}", field) from error
        except TextTooLong as error:
            assert most is not None
            limit = f"must have at most {most} tokens, and so at most {error.most} bytes, not {error.size}"
            least = -(-error.size * most // error.most)
            raise ContextExceeded(f"prompt {limit}", "prompt", least, most, is_exact=False) from None

    async def _of_text(self, tokenizer: Tokenizer, text: str, size: int, most: int | None) -> list[int]:
        if size <= _MAX_INLINE_BYTES:
            return tokenizer.encode(text, most)
        work = partial(tokenizer.encode, text, most)
        if size <= _LARGE_BYTES:
            return await asyncio.get_running_loop().run_in_executor(None, work)
        return await self._large_encoded(work)

    async def _of_chat(self, tokenizer: Tokenizer, rendering: "_Rendering", tenant: str) -> list[int]:
        turns = self._turns.setdefault(tokenizer, _TurnsOfModel())
        until = asyncio.get_running_loop().time() + MAX_WAIT_SECONDS
        await turns.first.take(tenant, until)
        ids = await _started(self._chats, rendering.with_first_share, turns.first)
        if ids is None:
            await turns.long.take(tenant, until)
            ids = await _started(self._long_chats, rendering.with_whole_time, turns.long)
        return await self._large_encoded(ids.encode) if isinstance(ids, RenderedChat) else ids

    async def _large_encoded(self, work: Callable[[], list[int]]) -> list[int]:
        return await asyncio.get_running_loop().run_in_executor(self._large, _returning_memory, work)


class _Rendering(NamedTuple):
    """The rendering of a chat, and its encoding unless the text is large."""

    tokenizer: Tokenizer
    chat: gateway_pb2.Chat
    most: int | None
    open_turn: bool

    def with_first_share(self) -> list[int] | RenderedChat | None:
        """Return None if it needs more than the first share of processor time."""
        try:
            return self._ids(whole=False)
        except FirstShareUsed:
            return None

    def with_whole_time(self) -> list[int] | RenderedChat:
        """Render it again from the start."""
        return self._ids(whole=True)

    def _ids(self, *, whole: bool) -> list[int] | RenderedChat:
        conversation = conversation_of(self.chat)
        with share_of_chat(whole=whole):
            given = conversation if self.open_turn else conversation._replace(open_turn=False)
            rendered = self.tokenizer.render_chat(given, self.most)
        return rendered.encode() if rendered.characters <= _LARGE_BYTES else rendered


def _started(threads: ThreadPoolExecutor, work: Callable[[], _Result], turns: Turns) -> "asyncio.Future[_Result]":
    """Start work that gives its turn back at its end, which may be later than that of a cancelled request."""
    loop = asyncio.get_running_loop()
    since = loop.time()

    def give_back(_: object) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(lambda: turns.give_back(loop.time() - since))

    started = threads.submit(work)
    started.add_done_callback(give_back)
    # Not stored where it is awaited: its error has that frame in its traceback, and the cycle would keep the prompt.
    return asyncio.wrap_future(started)


def _returning_memory(work: Callable[[], list[int]]) -> list[int]:
    try:
        return work()
    finally:
        if _RETURN_FREED_MEMORY:
            _RETURN_FREED_MEMORY(0)
