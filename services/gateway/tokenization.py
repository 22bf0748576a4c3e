"""Tokenizes the prompts of requests: short texts at once, others in threads, so that other streams do not wait.

Chats wait for the process that renders their template, two of each model at a time: a model whose template is slow
leaves threads to others.

A text of megabytes takes seconds, and a hundred times its size in memory while it is tokenized. Therefore a prompt that
cannot fit is refused by its size, at most two large texts are tokenized at once, and the memory goes back to the system
afterwards: glibc would keep it for the thread that has allocated it, once for each thread.
"""

import asyncio
import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from weakref import WeakKeyDictionary

from quire.v1 import gateway_pb2
from services.gateway.fleet.fleet import ServedModel
from services.gateway.request_checks import check_ids, check_prompt
from services.gateway.text.chat_template import ChatTemplateError
from services.gateway.text.conversation import conversation_of
from services.gateway.text.tokenizer import TextTooLong, Tokenizer
from services.runtime.errors import InvalidField

_MAX_INLINE_BYTES = 4096
_LARGE_BYTES = 64 * 1024
_LARGE_AT_ONCE = 2
_CHATS_OF_MODEL_AT_ONCE = 2
_CHAT_THREADS = 16
# Absent in other libraries than glibc.
_RETURN_FREED_MEMORY = getattr(ctypes.CDLL(None), "malloc_trim", None)


class PromptTokenizer:
    """Tokenizes prompts with the tokenizers of their models."""

    def __init__(self) -> None:
        self._large = ThreadPoolExecutor(_LARGE_AT_ONCE, "tokenize")
        self._chats = ThreadPoolExecutor(_CHAT_THREADS, "render")
        self._turns = WeakKeyDictionary[Tokenizer, asyncio.Semaphore]()

    async def token_ids(
        self, model: ServedModel, prompt: gateway_pb2.Prompt, most: int | None = None, *, open_turn: bool = True
    ) -> list[int]:
        """Return a prompt's token ids. False as `open_turn` leaves out the start of an assistant's turn.

        A text with surely more than `most` tokens is not tokenized; other results may be longer, too.
        Raises InvalidField.
        """
        check_prompt(prompt)
        if prompt.WhichOneof("kind") == "token_ids":
            check_ids(prompt.token_ids.ids, "prompt.token_ids.ids", model.description().vocabulary_size)
            return list(prompt.token_ids.ids)
        try:
            return await self._tokenized(model, prompt, most, open_turn)
        except ChatTemplateError as error:
            field = f"prompt.chat{error.field}"
            raise InvalidField(f"{field}: {error}", field) from error
        except TextTooLong as error:
            limit = f"must have at most {most} tokens, the model's context"
            raise InvalidField(
                f"prompt {limit}, and so at most {error.most} bytes, not {error.size}", "prompt"
            ) from None

    async def _tokenized(
        self, model: ServedModel, prompt: gateway_pb2.Prompt, most: int | None, open_turn: bool
    ) -> list[int]:
        is_chat, size = prompt.HasField("chat"), prompt.ByteSize()
        if not is_chat and size <= _MAX_INLINE_BYTES:
            return _tokenize(model, prompt, most, open_turn)
        large = size > _LARGE_BYTES
        work = partial(_tokenize_large if large else _tokenize, model, prompt, most, open_turn)
        if not is_chat:
            return await asyncio.get_running_loop().run_in_executor(self._large if large else None, work)
        turns = self._turns.setdefault(model.tokenizer, asyncio.Semaphore(_CHATS_OF_MODEL_AT_ONCE))
        await turns.acquire()
        return await _started(self._large if large else self._chats, work, turns)


def _started(
    threads: ThreadPoolExecutor, work: Callable[[], list[int]], turns: asyncio.Semaphore
) -> "asyncio.Future[list[int]]":
    """Start work that releases its turn at its end, which may be later than that of a cancelled request."""
    loop = asyncio.get_running_loop()
    started = threads.submit(work)
    started.add_done_callback(lambda _: loop.is_closed() or loop.call_soon_threadsafe(turns.release))
    # Not stored where it is awaited: its error has that frame in its traceback, and the cycle would keep the prompt.
    return asyncio.wrap_future(started)


def _tokenize(model: ServedModel, prompt: gateway_pb2.Prompt, most: int | None, open_turn: bool) -> list[int]:
    if prompt.WhichOneof("kind") == "text":
        return model.tokenizer.encode(prompt.text, most)
    conversation = conversation_of(prompt.chat)
    return model.tokenizer.encode_chat(conversation if open_turn else conversation._replace(open_turn=False), most)


def _tokenize_large(model: ServedModel, prompt: gateway_pb2.Prompt, most: int | None, open_turn: bool) -> list[int]:
    try:
        return _tokenize(model, prompt, most, open_turn)
    finally:
        if _RETURN_FREED_MEMORY:
            _RETURN_FREED_MEMORY(0)
