"""Names of fields in errors: those of smg's messages in place of the contract's."""

import re

from smg_grpc_proto.generated import vllm_engine_pb2 as smg_pb

_PREFIX = "sampling_params."
_NAMES = {
    "sampling.sample_count": "sampling_params.n",
    "prompt_token_ids": "tokenized.input_ids",
    "prompt.token_ids": "tokenized.input_ids",
    "prompt": "tokenized.input_ids",
    "stopping.stop_strings": "sampling_params.stop",
    "logprobs": "sampling_params.logprobs",
    "prompt_logprobs": "sampling_params.prompt_logprobs",
    "constraint.json_schema": "sampling_params.json_schema",
    "constraint.json_object": "sampling_params.json_object",
    "constraint.regex": "sampling_params.regex",
    "constraint": "sampling_params.constraint",
    **{f"sampling.{name}": _PREFIX + name for name in ("temperature", "top_k", "top_p", "min_p", "seed")},
    **{f"stopping.{name}": _PREFIX + name for name in ("max_tokens", "min_tokens", "stop_token_ids", "ignore_eos")},
    **{
        f"logit_rules.{name}": _PREFIX + name
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
    },
}
_CHOICE = {"constraint.regex": "sampling_params.choice"}
# Others are words of sentences too.
_IN_SENTENCES = re.compile(
    r"(?<![\w.])(?:" + "|".join(re.escape(name) for name in sorted(_NAMES, reverse=True) if "." in name) + r")(?!\w)"
)


class FieldNames:
    """smg's names of the fields from which one request was made."""

    def __init__(self, request: smg_pb.GenerateRequest) -> None:
        is_choice = request.sampling_params.WhichOneof("constraint") == "choice"
        self._names = _NAMES | _CHOICE if is_choice else _NAMES

    def field(self, field: str) -> str:
        """Return the name of a field, with its place such as `[3]`."""
        name, bracket, place = field.partition("[")
        return self._names.get(name, name) + bracket + place

    def sentence(self, text: str, field: str = "") -> str:
        """Return a text with smg's names of all fields. `field` is the one that it is about."""
        if field and "." not in field:
            return text.replace(field, self.field(field))
        return _IN_SENTENCES.sub(lambda found: self._names[found[0]], text)
