"""Encodes the names of special tokens in a conversation's texts as ordinary text.

A template adds special tokens as text, so a user's `<|im_end|>` would end the user's turn. Most conversations name no
special token and are rendered and encoded as they are. In the others each occurrence gets a mark, a character that no
text has. After rendering, what still looks like a special token is the template's. A second tokenizer, in which special
tokens have other names, encodes the text without the marks: the ids of ordinary text are those of the first one.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import tokenizers

from services.gateway.text.chat_template import ChatTemplateError, Conversation

# Unicode has no characters there, so that texts do not have them either.
_MARKS = [chr(code) for code in range(0xFDD1, 0xFDEF)]
_RENAMED = "\ufdef"
_ORDINARY = "ordinary"
# Special tokens of one model share a few beginnings of this length.
_BEGINNING = 4


class MarkedConversation(NamedTuple):
    """A conversation whose special tokens have marks."""

    conversation: Conversation
    mark: str


class LiteralText:
    """Marks special tokens in conversations, and encodes what was rendered of them."""

    def __init__(self, backend: tokenizers.Tokenizer, names_of_template: Callable[[], frozenset[int]]) -> None:
        """`names_of_template` returns the ids of other added tokens that structure a prompt."""
        self._backend = backend
        self._names_of_template = names_of_template

    def mark(self, conversation: Conversation, knows_role: Callable[[str], bool]) -> MarkedConversation | None:
        """Return a marked copy, None if there is nothing to mark. Raises ChatTemplateError.

        A role that the template does not know may be a part of a special token's name.
        """
        # Texts that a template may write side by side are side by side here, too.
        contents = [message.get("content") for message in conversation.messages]
        given = [contents, conversation.messages, conversation.tools, conversation.variables]
        texts = [*_texts(given)]
        joined = "".join(texts)
        places = [start + 1 for start, _, _ in self._occurrences(joined)]
        roles = {role for message in conversation.messages if self._is_part(role := message["role"], knows_role)}
        if not places and not roles:
            return None
        mark = next((one for one in _MARKS if one not in joined and _escaped(one) not in joined), None)
        if mark is None or _RENAMED in joined:
            raise ChatTemplateError("It has special tokens, and characters that Unicode does not assign.")
        marked = iter(_with_marks(texts, places, mark))
        contents, messages, tools, variables = _replaced(given, marked)
        messages = [
            message if content is None else message | {"content": content}
            for message, content in zip(messages, contents, strict=True)
        ]
        messages = [_with_marked_role(message, mark) if message["role"] in roles else message for message in messages]
        return MarkedConversation(conversation._replace(messages=messages, tools=tools, variables=variables), mark)

    def encode(self, text: str, mark: str) -> list[int]:
        """Encode a rendered text. Raises ChatTemplateError if the model itself makes a special token of a text."""
        parts, end = [], 0
        for start, after, token_id in self._occurrences(text):
            parts += [text[end:start], _name(token_id)]
            end = after
        plain = "".join([*parts, text[end:]]).replace(mark, "").replace(_escaped(mark), "")
        renamed, ids = self._renamed
        encoded = renamed.encode_batch_fast([plain], add_special_tokens=False)[0].ids
        if any(token_id in self._names and token_id not in ids for token_id in encoded):
            raise ChatTemplateError("It has a special token that this tokenizer cannot encode as text.")
        return [ids.get(token_id, token_id) for token_id in encoded]

    @cached_property
    def _names(self) -> dict[int, str]:
        """The tokens that structure a prompt."""
        others = self._names_of_template()
        tokens = self._backend.get_added_tokens_decoder()
        return {at: token.content for at, token in tokens.items() if token.special or at in others}

    @cached_property
    def _beginnings(self) -> frozenset[str]:
        return frozenset(name[:_BEGINNING] for name in self._names.values())

    @cached_property
    def _finder(self) -> tuple[tokenizers.Tokenizer, list[int]]:
        """A tokenizer of special tokens alone, which finds them as the first one does; and their ids there."""
        finder = tokenizers.Tokenizer(tokenizers.models.WordLevel({_ORDINARY: 0}, unk_token=_ORDINARY))
        finder.add_special_tokens(
            [tokenizers.AddedToken(name, normalized=False, special=True) for name in self._names.values()]
        )
        ids: dict[int | None, int] = {finder.token_to_id(name): token_id for token_id, name in self._names.items()}
        return finder, [ids.get(at, -1) for at in range(finder.get_vocab_size(with_added_tokens=True))]

    @cached_property
    def _renamed(self) -> tuple[tokenizers.Tokenizer, dict[int | None, int]]:
        """The second tokenizer, and the first one's ids of its added tokens."""
        description = json.loads(self._backend.to_str())
        for token in (added := description["added_tokens"]):
            if token["id"] in self._names:
                token |= {"content": _name(token["id"]), "normalized": False, "single_word": False}
        made = tokenizers.Tokenizer.from_str(json.dumps(description))
        ids: dict[int | None, int] = {made.token_to_id(token["content"]): token["id"] for token in added}
        return made, ids

    def _occurrences(self, text: str) -> list[tuple[int, int, int]]:
        """Return start, end and id of each special token in a text."""
        if not any(beginning in text for beginning in self._beginnings):
            return []  # far faster than the search
        finder, ids = self._finder
        found = finder.encode(text, add_special_tokens=False)
        return [(*span, ids[at]) for at, span in zip(found.ids, found.offsets, strict=True) if at]

    def _is_part(self, role: str, knows_role: Callable[[str], bool]) -> bool:
        return bool(role) and not knows_role(role) and any(role in name for name in self._names.values())


def _with_marks(texts: list[str], places: list[int], mark: str) -> Iterator[str]:
    """Insert the mark at places in the joined texts; at a border, at the end of the first one."""
    remaining = iter([*places, -1])
    place = next(remaining)
    for text, end in zip(texts, accumulate(map(len, texts)), strict=True):
        start, parts, done = end - len(text), [], 0
        while start < place <= end:
            parts += [text[done : place - start], mark]
            done, place = place - start, next(remaining)
        yield "".join([*parts, text[done:]])


def _with_marked_role(message: Mapping[str, Any], mark: str) -> dict[str, Any]:
    role: str = message["role"]
    return {**message, "role": role[:1] + mark + role[1:]}


def _texts(value: Any) -> Iterator[str]:
    """Yield all strings in a value, names of members included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, member in value.items():
            yield name
            yield from _texts(member)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _replaced(value: Any, texts: Iterator[str]) -> Any:
    """Return a copy of a value with other strings, in the order of `_texts`."""
    if isinstance(value, str):
        return next(texts)
    if isinstance(value, Mapping):
        return {next(texts): _replaced(member, texts) for member in value.values()}
    return [_replaced(item, texts) for item in value] if isinstance(value, list | tuple) else value


def _name(token_id: int) -> str:
    return f"{_RENAMED}{token_id}{_RENAMED}"


def _escaped(character: str) -> str:
    return json.dumps(character)[1:-1]
