"""The schemas of a model's files, and the sentence that refuses a value.

Each field that Quire or transformers reads has a type, bounds and a sentence here; what is left out of a file, or null,
is not checked. Schemas do not say which fields a model needs: that depends on its type, which transformers knows.
"""

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError
from pydantic_core import PydanticCustomError

from services.models.files.bounded_json import InvalidModelFile
from services.models.files.config_schema import ModelConfig, Quantization, Rotation
from services.models.files.numbers import (
    Factor,
    FileSchema,
    PositiveShare,
    Share,
    TokenId,
    TokenIdOrNone,
    TokenIds,
    said,
)
from services.runtime.http.validation import EXPECTED, violation

__all__ = [
    "AdapterConfig",
    "GenerationConfig",
    "ModelConfig",
    "TokenizerConfig",
    "TokenizerFile",
    "check_schema",
]


# Of a token's id.
_MOST_DIGITS = 8


class GenerationConfig(FileSchema):
    """`generation_config.json`: the tokens that end a text, and defaults of sampling.

    The bounds of defaults are those of requests' fields in the protos, which a test compares.
    """

    eos_token_id: TokenIds | None = said("the tokens that end a text")
    bos_token_id: TokenIdOrNone | list[TokenIdOrNone] | None = said("the token at the start of a text")
    pad_token_id: TokenIdOrNone | None = said("the token that fills batches")
    do_sample: bool | None = said("whether tokens are drawn, not the likeliest taken")
    temperature: Annotated[float, Field(ge=0)] | None = said("the divisor of logits")
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = said("how many tokens are drawn from; 0 and -1: all")
    top_p: PositiveShare | None = said("the total probability of the tokens to sample from")
    min_p: Share | None = said("the probability of a drawn token relative to the likeliest")
    repetition_penalty: Annotated[float, Field(gt=0)] | None = said("the divisor of logits of earlier tokens")
    max_new_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = said("tokens of an answer")
    max_length: Annotated[int, Field(ge=0, le=1 << 30)] | None = said("tokens of prompt and answer")


class AddedToken(FileSchema):
    """A token that is not split."""

    content: str = Field(description="the text of a token")
    special: bool | None = said("whether a token is no text")
    lstrip: bool | None = said("whether a token takes the whitespace before it")
    rstrip: bool | None = said("whether a token takes the whitespace after it")
    normalized: bool | None = said("whether a token is found in normalized text")
    single_word: bool | None = said("whether a token is found between words only")


_Token = str | AddedToken


class NamedTemplate(FileSchema):
    """One of several chat templates."""

    name: str = Field(description="the name of a chat template")
    template: str = Field(description="a chat template")


def _is_id(key: str) -> str:
    if not (key.isascii() and key.isdecimal() and len(key) <= _MOST_DIGITS):
        raise PydanticCustomError(EXPECTED, "under the id of a token")
    return key


TokenKey = Annotated[str, AfterValidator(_is_id)]


class TokenizerConfig(FileSchema):
    """`tokenizer_config.json` and `special_tokens_map.json`: special tokens, and the chat template."""

    tokenizer_class: str | None = said("a class of transformers")
    model_max_length: Annotated[float, Field(gt=0, le=1e40)] | None = said("tokens that the model reads")
    added_tokens_decoder: dict[TokenKey, AddedToken] | None = said("tokens that are not split, by their ids")
    extra_special_tokens: dict[str, _Token] | list[_Token] | None = said("further special tokens")
    additional_special_tokens: list[_Token] | None = said("further special tokens")
    bos_token: _Token | None = said("the token at the start of a text")
    eos_token: _Token | None = said("the token at the end of a text")
    unk_token: _Token | None = said("the token of unknown text")
    pad_token: _Token | None = said("the token that fills batches")
    sep_token: _Token | None = said("the token between texts")
    cls_token: _Token | None = said("the token of a text's class")
    mask_token: _Token | None = said("the token of hidden text")
    add_bos_token: bool | None = said("whether a text gets a token at its start")
    add_eos_token: bool | None = said("whether a text gets a token at its end")
    add_prefix_space: bool | None = said("whether a text gets a space at its start")
    clean_up_tokenization_spaces: bool | None = said("whether spaces before punctuation are dropped from a text")
    chat_template: str | list[NamedTemplate] | dict[str, str] | None = said("how a chat becomes a text")


class _TokenizerModel(FileSchema):
    type: str | None = said("the kind of tokenizer")
    vocab: dict[str, Any] | list[Any] = Field(description="the vocabulary")


class _NumberedToken(FileSchema):
    id: TokenId = Field(description="the id of a token")
    content: str = Field(description="the text of a token")


class TokenizerFile(FileSchema):
    """`tokenizer.json`, which the library `tokenizers` reads: enough to refuse another file."""

    model: _TokenizerModel = Field(description="how words become tokens")
    added_tokens: list[_NumberedToken] | None = said("tokens that are not split")


class AdapterConfig(FileSchema):
    """`adapter_config.json`: changes of low rank to the weights of another model."""

    peft_type: str | None = said("the kind of adapter")
    base_model_name_or_path: str | None = said("the model that it changes")
    r: Annotated[int, Field(ge=1, le=1 << 16)] | None = said("the rank")
    lora_alpha: Annotated[float, Field(gt=0, le=1e9)] | None = said("the scale of the change, times the rank")
    lora_dropout: Share | None = said("the part of inputs dropped in training")
    target_modules: str | list[str] | None = said("modules that it changes")
    rank_pattern: dict[str, Annotated[int, Field(ge=1, le=1 << 16)]] | None = said("ranks of certain modules")
    alpha_pattern: dict[str, Factor] | None = said("scales of certain modules")


_SCHEMAS = (ModelConfig, Rotation, Quantization, GenerationConfig, TokenizerConfig, AddedToken, NamedTemplate)
# Errors of a value that is of another type; the one that fits says more.
_OF_TYPE = ("_type", "int_from_float")


def check_schema(name: str, schema: type[FileSchema], values: Mapping[str, Any]) -> None:
    """Check the fields of a file. Raises InvalidModelFile with the file's `name`, the field and what it must be."""
    try:
        schema.model_validate(values)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        found = violation(_fitting(errors), values)
        sentence = _sentence(schema, found.path)
        raise InvalidModelFile(f"{name}: {found.message}{f' ({sentence})' if sentence else ''}") from error


def _fitting(errors: Any) -> Any:
    """Return the errors of the first field, without those of union members that are of another type than the value."""
    first = [one for one in errors if one["loc"][:1] == errors[0]["loc"][:1]]
    return [one for one in first if not one["type"].endswith(_OF_TYPE)] or first


def _sentence(schema: type[FileSchema], path: str) -> str:
    """Return the sentence of the innermost field of a path; empty for members of lists and the like."""
    known = _sentences(schema)
    parts = path.replace("[", ".").split(".")
    return next((known[name] for name in (path, *reversed(parts)) if name in known), "")


@cache
def _sentences(schema: type[FileSchema]) -> dict[str, str]:
    return {
        field.alias or name: field.description
        for one in (*(_SCHEMAS if schema is not TokenizerFile else (_TokenizerModel, _NumberedToken)), schema)
        for name, field in one.model_fields.items()
        if field.description
    }
