"""The tokens that end a generation of a model in a GGUF file, and the roles that tokens have by their names.

A file names one token for the end of a sequence, and rarely those for the ends of a turn and of a message, although
chats end with them. So they are found by their names, as in llama.cpp (src/llama-vocab.cpp), from which the names are.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from services.models.gguf.metadata import TokenizerMetadata, TokenType

# Ends of turns, messages and texts.
_ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
    *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
    "<|ifm|im_end|>",
)
# Tokens between the files of a repository: text behind them belongs to another file. By key, for files that name them.
_FILE_ENDS: Mapping[str, tuple[str, ...]] = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>", "<|plamo:file_separator|>"),
}
# Parts of a file around a gap. They end nothing, but are no text.
_GAPS: Mapping[str, tuple[str, ...]] = {
    "fim_pre": (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>"),
        *("<|code_prefix|>", "<|prefix|>", "<|plamo:fim_prefix|>"),
    ),
    "fim_suf": (
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>"),
        *("<|code_suffix|>", "<|suffix|>", "<|plamo:fim_suffix|>"),
    ),
    "fim_mid": (
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>"),
        *("<|code_middle|>", "<|middle|>", "<|plamo:fim_middle|>"),
    ),
}
# Marks inside a message, which gpt-oss's files call control tokens.
_MARKS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
# With these among the ends, `<|end|>` ends a message only, and `</s>` is a tag of HTML.
_CALLS, _ANSWERS = {"<|call|>", "<|calls|>"}, {"<|return|>", "<|flush|>"}
_AFTER_TAGS = {"<|tool_response>", "<|plamo:eos|>"}


@dataclass(frozen=True)
class TokenRoles:
    """Ids of tokens: `ends` stop a generation, the end of a sequence first, and `special` ones have no text.

    Both `special` and `user_defined` ones are found in a text before it is split.
    """

    ends: tuple[int, ...]
    special: frozenset[int]
    user_defined: frozenset[int]


def token_roles(metadata: TokenizerMetadata, eos: int | None) -> TokenRoles:
    """Return the roles of a file's tokens, whose end of a sequence is `eos`.

    Raises ModelUnsupported, with the key, if the file names a token beyond its vocabulary.
    """
    ids = {text: token for token, text in enumerate(metadata.tokens)}
    files, gaps = _unnamed(metadata, ids, _FILE_ENDS), _unnamed(metadata, ids, _GAPS)
    given = [metadata.token(role) for role in ("eot", "eom", *_FILE_ENDS)]
    ends = {*_found(ids, _ENDS), *files, *(one for one in (eos, *given) if one is not None)}
    texts = {metadata.tokens[one] for one in ends}
    tags, messages = _found(ids, _tags(texts)), _found(ids, _messages(texts))
    user_defined = {*metadata.of_type(TokenType.USER_DEFINED), *_found(ids, _MARKS), *messages}
    special = {*metadata.of_type(TokenType.CONTROL, TokenType.UNKNOWN), *_found(ids, _ENDS), *files, *gaps}
    special -= {*_found(ids, _MARKS), *messages, *tags}
    ordered = sorted(ends.difference(tags, messages), key=lambda one: (one != eos, one))
    return TokenRoles(tuple(ordered), frozenset(special), frozenset(user_defined - special))


def _messages(ends: set[str]) -> list[str]:
    return ["<|end|>"] if ends & _CALLS and ends & _ANSWERS else []


def _tags(ends: set[str]) -> list[str]:
    return ["</s>"] if ends & _AFTER_TAGS else []


def _unnamed(metadata: TokenizerMetadata, ids: Mapping[str, int], names: Mapping[str, tuple[str, ...]]) -> list[int]:
    """Return a token by its name for each role of which the file names none."""
    roles = (known for role, known in names.items() if metadata.token(role) is None)
    return [token for known in roles for token in _found(ids, known)[:1]]


def _found(ids: Mapping[str, int], names: Iterable[str]) -> list[int]:
    return [ids[name] for name in names if name in ids]
