"""The model's tokenizer in the engine's process, for prompts that are text and for stop strings."""

import asyncio
from pathlib import Path

import tokenizers

from services.models.files.tokenizer_loading import InvalidTokenizer, load_tokenizer
from services.runtime.errors import InvalidField, UnsupportedField

# Tokenizing takes about a second for each.
_MOST_CHARACTERS = 1 << 20


class EngineTokenizer:
    """Loads the tokenizer when it is first needed: smg sends token ids, and needs it only for stop strings."""

    def __init__(self, folder: Path) -> None:
        """`folder` is the model's."""
        self._folder = folder
        self._loading = asyncio.Lock()
        self._backend: tokenizers.Tokenizer | None = None

    async def backend(self, field: str) -> tokenizers.Tokenizer:
        """Return the tokenizer, which `field` needs. Raises UnsupportedField if the model has none."""
        async with self._loading:
            if self._backend is None:
                try:
                    self._backend = (await asyncio.to_thread(load_tokenizer, self._folder)).backend
                except InvalidTokenizer as error:
                    raise UnsupportedField(f"{field} requires the model's tokenizer: {error}", field) from error
        return self._backend

    async def token_ids(self, text: str) -> list[int]:
        """Return the tokens of a prompt, with the special ones that the tokenizer adds. Raises InvalidField."""
        if len(text) > _MOST_CHARACTERS:
            raise InvalidField(f"text must have at most {_MOST_CHARACTERS} characters, not {len(text)}", "text")
        backend = await self.backend("text")
        async with self._loading:  # one text at a time
            return (await asyncio.to_thread(backend.encode, text)).ids
