"""Records of requests: when each arrived, which blocks it shares with which others, and how long it became.

A record is text, one JSON object a line: a header, a line for each request when it ends, and a last line that says why
it ends. It contains no token ids: blocks are named by keys, hashes chained over a secret of the record, the request's
salt, and all tokens up to the block's end. Who does not know the secret, which is not in the record, cannot tell by
guessing which tokens a key stands for. Files and clocks belong to whoever writes the lines and reads them.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from blocks import block_keys, root_key
from engine.schedule.limits import Preemption
from engine.schedule.request import FinishReason, Request
from engine.schedule.scheduler import Scheduler
from engine.schedule.sequence_group import Group
from engine.schedule.sequence_group import Sequence as EngineSequence

REQUESTS_FORMAT = "quire-requests"
REQUESTS_VERSION = 1
_CONTAINS = (
    "for each request: arrival and end in engine steps, keys of the full blocks of prompt and output, their lengths in "
    "tokens, kind of decoding, priority"
)
_SENSITIVE = "no token ids; keys tell which requests begin alike, and lengths how long they are"

# Of a key, as hexadecimal digits: 64 bits, enough to tell apart what one record can hold.
_KEY_DIGITS = 16


class InvalidRecord(Exception):
    """A line is none of a record of requests; the message says which and why."""


@dataclass(frozen=True)
class RecordSettings:
    """The engine that was recorded: what a replay takes where nothing else is asked for."""

    block_size: int
    device_blocks: int
    token_budget: int
    max_sequences: int
    host_blocks: int = 0
    preemption: str = Preemption.RECOMPUTE.value
    admission_watermark: float = 0.0
    ahead: bool = False


@dataclass(frozen=True)
class RecordedRequest:
    """A request that ended. Steps are the engine's, lengths in tokens.

    `number` counts requests in the order of their arrival. `keys` are those of the full blocks of prompt and output
    together. `prompt_tokens` counts what was known when it came, `max_tokens` what it was allowed to generate beyond
    that, `output_tokens` what it did.
    """

    number: int
    arrival_step: int
    end_step: int
    keys: Sequence[str]
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    decoding: str
    priority: int
    finish: str


class RequestsRecord:
    """Writes the lines of a record: `begin`, then `ended` for each request, then `end`."""

    def __init__(self, scheduler: Scheduler, secret: bytes) -> None:
        """Begin a record of this scheduler's requests. `secret` is random, and known to nobody else."""
        capacity, limits = scheduler.capacity, scheduler.limits
        self._settings = RecordSettings(
            capacity.block_size,
            capacity.device_blocks,
            limits.token_budget,
            limits.max_sequences,
            capacity.host_blocks,
            limits.preemption.value,
            limits.admission_watermark,
            scheduler.ahead,
        )
        self._secret = secret
        self._requests = 0

    def begin(self, engine_id: str, created: str) -> list[str]:
        """Return the header. `created` says for people when the record began."""
        header = {
            "format": REQUESTS_FORMAT,
            "version": REQUESTS_VERSION,
            "contains": _CONTAINS,
            "sensitive": _SENSITIVE,
            "created": created,
            "engine_id": engine_id,
            "spec": asdict(self._settings),
        }
        return [_line(header)]

    def ended(self, group: Group, arrival_step: int, end_step: int) -> list[str]:
        """Return the lines of a request that ended, one for each sample: they have the keys of the prompt in common.

        There is none of what had ended before the request came here.
        """
        samples = [member for member in group.samples if member.index not in group.request.ended]
        return [self._sample(member, arrival_step, end_step) for member in samples]

    def _sample(self, sequence: EngineSequence, arrival_step: int, end_step: int) -> str:
        request = sequence.request
        given = len(request.samples[sequence.index])
        recorded = RecordedRequest(
            number=sequence.id,
            arrival_step=arrival_step,
            end_step=end_step,
            keys=list(self._keys(sequence)),
            prompt_tokens=len(request.prompt) + given,
            output_tokens=sequence.generated - given,
            max_tokens=request.stopping.max_tokens - given,
            decoding=_decoding(request),
            priority=request.priority,
            finish=(sequence.finish or FinishReason.FAILED).name.lower(),
        )
        self._requests += 1
        return _line(asdict(recorded))

    def end(self, reason: str) -> list[str]:
        """Return the last line, which says in words why nothing follows."""
        return [_line({"end": reason, "requests": self._requests})]

    def _keys(self, sequence: EngineSequence) -> Iterator[str]:
        size = self._settings.block_size
        root = root_key("", self._secret + sequence.group.salt)
        return (key.hex()[:_KEY_DIGITS] for key in block_keys(root, sequence.tokens, size))


def read_header(line: str) -> RecordSettings:
    """Read the first line. Raises InvalidRecord when it is no header of this format and version."""
    header = _content(line, 1)
    if header.get("format") != REQUESTS_FORMAT or header.get("version") != REQUESTS_VERSION:
        raise InvalidRecord(
            f"line 1 says format {header.get('format')!r}, version {header.get('version')!r}; "
            f"read here is {REQUESTS_FORMAT!r}, version {REQUESTS_VERSION}"
        )
    try:
        return RecordSettings(**header["spec"])
    except (KeyError, TypeError) as error:
        raise InvalidRecord(f"line 1 has no spec of an engine: {error}") from error


def read_request(line: str, number: int) -> RecordedRequest | str:
    """Read line `number`: a request, or the reason why the record ends. Raises InvalidRecord."""
    content = _content(line, number)
    if "end" in content:
        return str(content["end"])
    try:
        request = RecordedRequest(**content)
        known = request.prompt_tokens + request.output_tokens
        sound = request.prompt_tokens > 0 <= request.output_tokens <= request.max_tokens and known >= len(request.keys)
    except TypeError as error:
        raise InvalidRecord(f"line {number} is no request: {error}") from error
    if not sound:
        raise InvalidRecord(f"line {number} has lengths that cannot be")
    return request


def _decoding(request: Request) -> str:
    if request.beam_search:
        return "beam"
    return "greedy" if request.sampling.greedy else "sampled"


def _line(content: Any) -> str:
    return json.dumps(content, separators=(",", ":"))


def _content(line: str, number: int) -> dict[str, Any]:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRecord(f"line {number} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise InvalidRecord(f"line {number} is no JSON object")
    return content
