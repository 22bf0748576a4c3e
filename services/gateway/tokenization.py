"""Tokenizes the prompts of requests: short ones at once, others in threads, so that other streams do not wait.

A text of megabytes takes seconds, and a hundred times its size in memory while it is tokenized. Therefore a prompt that
cannot fit is refused by its size, at most two large texts are tokenized at once, and the memory goes back to the system
afterwards: glibc would keep it for the thread that has allocated it, once for each thread.
"""

import asyncio
import ctypes
from concurrent.futures import ThreadPoolExecutor

from quire.v1 import gateway_pb2
from services.gateway.fleet.fleet import ServedModel
from services.gateway.request_checks import check_ids, check_prompt
from services.gateway.text.chat_template import ChatTemplateError
from services.gateway.text.conversation import conversation_of
from services.gateway.text.tokenizer import TextTooLong
from services.runtime.errors import InvalidField

_MAX_INLINE_BYTES = 4096
_LARGE_BYTES = 64 * 1024
_LARGE_AT_ONCE = 2
# Absent in other libraries than glibc.
_RETURN_FREED_MEMORY = getattr(ctypes.CDLL(None), "malloc_trim", None)


class PromptTokenizer:
    """Tokenizes prompts with the tokenizers of their models."""

    def __init__(self) -> None:
        self._large = ThreadPoolExecutor(_LARGE_AT_ONCE, "tokenize")

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
        if prompt.ByteSize() > _LARGE_BYTES:
            loop = asyncio.get_running_loop()
            # Not stored: its error has this frame in its traceback, and the cycle would keep the prompt.
            return await loop.run_in_executor(self._large, _tokenize_large, model, prompt, most, open_turn)
        if _is_quick(model, prompt):
            return _tokenize(model, prompt, most, open_turn)
        return await asyncio.to_thread(_tokenize, model, prompt, most, open_turn)


def _is_quick(model: ServedModel, prompt: gateway_pb2.Prompt) -> bool:
    """Return True if other streams can wait for the prompt's tokenization."""
    if prompt.ByteSize() > _MAX_INLINE_BYTES:
        return False
    return prompt.HasField("text") or not model.tokenizer.is_slow_with(
        prompt.chat.SerializeToString().decode("latin-1")
    )


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
