"""Submissions of an engine, made from requests of smg.

What a request leaves out is what vLLM's servicer takes: a temperature of 1, and 0 for most other numbers. smg itself
fills in the model's defaults, which GetModelInfo reports.
"""

import secrets
from collections.abc import Sequence
from struct import pack, unpack
from typing import NamedTuple

from smg_grpc_proto.generated import vllm_engine_pb2 as smg_pb

from blocks import blocks_for
from quire.v1 import decoding_pb2, engine_pb2
from services.engine.smg.request_fields import check_fields
from services.runtime.errors import ContextExceeded, InvalidField, UnsupportedField
from services.wire.field_rules import check
from services.wire.requests.choices import choice_pattern

_LARGEST = 2**31 - 1
_AS_MANY_AS_FIT = -1
_SEED_BITS = 63
_PREFIX = "sampling_params."
_OWN_NAMES = {"stop_strings": "stop", "sample_count": "n"}


class RequestLimits(NamedTuple):
    """What an engine holds: the tokens of its context and of a block, and the blocks of one request."""

    context_tokens: int
    block_size: int
    request_blocks: int

    def most_tokens(self, prompt_tokens: int, sequences: int) -> int:
        """Return how many tokens of a sequence fit, prompt and output together.

        Sequences share the whole blocks of the prompt. The last generated token needs no slot.
        """
        shared = min(prompt_tokens // self.block_size, self.request_blocks)
        slots = (shared + (self.request_blocks - shared) // sequences) * self.block_size + 1
        return min(self.context_tokens, slots)

    def most_prompt_tokens(self, max_tokens: int, sequences: int) -> int:
        """Return how many tokens of a prompt surely fit with `max_tokens` for each sequence, at least 1."""
        own = sequences * (blocks_for(max_tokens, self.block_size) + 1)
        return max(1, min(self.context_tokens - max_tokens, (self.request_blocks - own) * self.block_size))


def check_request(request: smg_pb.GenerateRequest) -> None:
    """Check what does not depend on the prompt. Raises InvalidField and UnsupportedField, naming the field."""
    check_fields(request)
    if not request.request_id:
        raise InvalidField("request_id is missing", "request_id")
    if request.WhichOneof("input") is None:
        raise InvalidField("tokenized or text must be given", "tokenized")
    if request.data_parallel_rank:
        raise InvalidField("data_parallel_rank must be 0: the engine has one rank", "data_parallel_rank")
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(request.sampling_params, name) == -1:
            message = f"{_PREFIX}{name} of all tokens (-1) is not supported"
            raise UnsupportedField(message, _PREFIX + name)
    check(decoding_pb2.Stopping(stop_strings=request.sampling_params.stop), _invalid)
    check(_sampling(request.sampling_params), _invalid)  # before there is a sample of each


def submission_of(
    request: smg_pb.GenerateRequest, prompt: Sequence[int], limits: RequestLimits
) -> engine_pb2.Submission:
    """Return the submission of a checked request. Raises InvalidField, naming the field."""
    given = request.sampling_params
    token_ids = _truncated(prompt, given, limits)
    return engine_pb2.Submission(
        request_id=request.request_id,
        attempt=1,
        prompt_token_ids=[_checked(one, "tokenized.input_ids") for one in token_ids],
        samples=[engine_pb2.SampleState()] * (given.n or 1),
        sampling=_sampling(given),
        logit_rules=_logit_rules(given),
        stopping=_stopping(given, len(token_ids), limits),
        constraint=_constraint(given),
        logprobs=given.logprobs if given.HasField("logprobs") else None,
        prompt_logprobs=given.prompt_logprobs if given.HasField("prompt_logprobs") else None,
    )


def _sampling(given: smg_pb.SamplingParams) -> decoding_pb2.Sampling:
    return decoding_pb2.Sampling(
        temperature=_decimal(given.temperature) if given.HasField("temperature") else 1.0,
        top_p=_decimal(given.top_p) if given.top_p else 1.0,
        top_k=min(given.top_k, _LARGEST),
        min_p=_decimal(given.min_p),
        seed=given.seed if given.HasField("seed") else secrets.randbits(_SEED_BITS),
        sample_count=_checked(given.n or 1, "sampling_params.n"),
    )


def _logit_rules(given: smg_pb.SamplingParams) -> decoding_pb2.LogitRules:
    return decoding_pb2.LogitRules(
        repetition_penalty=_decimal(given.repetition_penalty) if given.repetition_penalty else 1.0,
        presence_penalty=_decimal(given.presence_penalty),
        frequency_penalty=_decimal(given.frequency_penalty),
        logit_bias={token: _decimal(bias) for token, bias in given.logit_bias.items()},
    )


def _stopping(given: smg_pb.SamplingParams, prompt_tokens: int, limits: RequestLimits) -> decoding_pb2.Stopping:
    # At least 1, so that the engine reports the excess.
    fitting = max(1, limits.most_tokens(prompt_tokens, given.n or 1) - prompt_tokens)
    max_tokens = _checked(given.max_tokens, "sampling_params.max_tokens") if given.HasField("max_tokens") else fitting
    return decoding_pb2.Stopping(
        max_tokens=max_tokens,
        min_tokens=_checked(given.min_tokens, "sampling_params.min_tokens"),
        stop_token_ids=[_checked(one, "sampling_params.stop_token_ids") for one in given.stop_token_ids],
        ignore_eos=given.ignore_eos,
    )


def _constraint(given: smg_pb.SamplingParams) -> decoding_pb2.OutputConstraint | None:
    match given.WhichOneof("constraint"):
        case None:
            return None
        case "choice":
            pattern = choice_pattern(given.choice.choices, "sampling_params.choice")
            return decoding_pb2.OutputConstraint(regex=pattern)
        case "json_object" if not given.json_object:  # vLLM refuses it too
            field = "sampling_params.json_object"
            raise InvalidField(f"{field} must be true if it is set", field)
        case kind:
            return decoding_pb2.OutputConstraint(**{kind: getattr(given, kind)})


def _truncated(prompt: Sequence[int], given: smg_pb.SamplingParams, limits: RequestLimits) -> Sequence[int]:
    """Return the last tokens of a prompt, as many as the request keeps."""
    most, field = given.truncate_prompt_tokens, "sampling_params.truncate_prompt_tokens"
    if not given.HasField("truncate_prompt_tokens"):
        if len(prompt) > limits.context_tokens:  # before there are copies
            message = f"tokenized.input_ids must have at most {limits.context_tokens} tokens, not {len(prompt)}"
            raise ContextExceeded(message, "tokenized.input_ids", len(prompt), limits.context_tokens)
        return prompt
    if most < 1 and most != _AS_MANY_AS_FIT:
        raise InvalidField(f"{field} must be -1 or at least 1, not {most}", field)
    if most == _AS_MANY_AS_FIT:
        max_tokens = given.max_tokens if given.HasField("max_tokens") else 1
        most = limits.most_prompt_tokens(min(max_tokens, _LARGEST), given.n or 1)
    return prompt[-most:]


def _checked(value: int, field: str) -> int:
    """Return a number that 31 bits hold. Raises InvalidField."""
    if value > _LARGEST:
        raise InvalidField(f"{field} must be at most {_LARGEST}, not {value}", field)
    return value


def _decimal(value: float) -> float:
    """Return the number that a client wrote with up to 7 digits, which 32 bits hold only roughly."""
    short = float(f"{value:.7g}")
    return short if unpack("f", pack("f", short))[0] == value else value


def _invalid(message: str, field: str) -> InvalidField:
    """Return an error with smg's name of a field of Sampling or Stopping."""
    own, bracket, place = field.partition("[")
    name = _PREFIX + _OWN_NAMES.get(own, own) + bracket + place
    return InvalidField(message.replace(field, name, 1), name)
