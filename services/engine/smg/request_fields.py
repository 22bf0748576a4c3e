"""The fields of smg's requests that an engine follows. All others are refused by name, also new ones."""

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from smg_grpc_proto.generated import vllm_engine_pb2 as smg_pb

from services.runtime.errors import UnsupportedField

_MEDIA = "only text is served"
_TRANSFER = "KV blocks are not moved between engines"
_GRAMMARS = "json_schema, json_object, regex and choice are"


class Followed(NamedTuple):
    """Fields of a message that are followed, and why others are not."""

    fields: Collection[str]
    reasons: Mapping[str, str]


# `original_text` is what input_ids were made from, and for debugging only.
REQUEST = Followed(
    ("request_id", "tokenized", "text", "sampling_params", "stream", "data_parallel_rank"),
    {
        "kv_transfer_params": _TRANSFER,
        "kv_transfer_params_json": _TRANSFER,
        "mm_inputs": _MEDIA,
        "extra_mm_inputs": _MEDIA,
        "media_refs": _MEDIA,
    },
)
TOKENIZED = Followed(("original_text", "input_ids"), {})
# Answers have no text, so the spaces between special tokens concern smg alone.
SAMPLING = Followed(
    (
        *("temperature", "top_p", "top_k", "min_p", "seed", "n", "logit_bias"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty"),
        *("max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "truncate_prompt_tokens"),
        *("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"),
        *("logprobs", "prompt_logprobs", "grammar_from_first_token"),
        *("json_schema", "json_object", "regex", "choice"),
    ),
    {"grammar": _GRAMMARS, "structural_tag": _GRAMMARS},
)


def check_fields(request: smg_pb.GenerateRequest) -> None:
    """Raise UnsupportedField for a field that is set and not followed."""
    _check(request, REQUEST, "")
    _check(request.tokenized, TOKENIZED, "tokenized.")
    _check(request.sampling_params, SAMPLING, "sampling_params.")


def _check(message: Message, followed: Followed, prefix: str) -> None:
    for name in _given(message):
        if name not in followed.fields:
            reason = followed.reasons.get(name, "this version does not support it")
            raise UnsupportedField(f"{prefix}{name} is not supported: {reason}", f"{prefix}{name}")


def _given(message: Message) -> Iterator[str]:
    """Yield the names of the fields that are set; of those that the installed protocol lacks, their numbers."""
    for field, _ in message.ListFields():
        yield field.name
    unknown = UnknownFieldSet(message)
    for at in range(len(unknown)):
        yield f"field {unknown[at].field_number}"
