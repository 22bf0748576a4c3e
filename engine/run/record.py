"""Records of requests: arrival, shared blocks and lengths.

Records have no token ids. Blocks are identified by keys: hashes chained over a secret of the record, the request's salt
and all tokens up to the end of the block. The secret is not part of the record, so tokens cannot be guessed from keys.
The caller owns files and clocks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from blocks import block_keys, root_key
from engine.schedule.limits import Preemption
from engine.schedule.request import FinishReason, Request
from engine.schedule.scheduler import Scheduler
from engine.schedule.sequence_group import Group
from engine.schedule.sequence_group import Sequence as EngineSequence

# 64 bits distinguish the blocks of one record.
_KEY_BYTES = 8


@dataclass(frozen=True)
class RecordSettings:
    """Settings of the recorded engine: the defaults of a replay."""

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
    """One sample of an ended request. Steps are counted by the engine, lengths are in tokens.

    `number` counts samples and `request` requests, both in order of arrival. `keys` are the keys of the full blocks
    of prompt and output. `prompt_tokens` counts the tokens known at arrival, `output_tokens` the generated ones, and
    `max_tokens` is their limit.
    """

    number: int
    arrival_step: int
    end_step: int
    keys: Sequence[int]
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    decoding: str
    priority: int
    finish: str
    request: int

    @property
    def is_valid(self) -> bool:
        """Whether the lengths are consistent."""
        known = self.prompt_tokens + self.output_tokens
        lengths = self.prompt_tokens > 0 and 0 <= self.output_tokens <= self.max_tokens
        return lengths and known >= len(self.keys)


class RequestsRecord:
    """Describes the requests of one scheduler after they ended."""

    def __init__(self, scheduler: Scheduler, secret: bytes) -> None:
        """`secret` is random and known only to this record."""
        capacity, limits = scheduler.capacity, scheduler.limits
        self.settings = RecordSettings(
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

    def describe(self, group: Group, arrival_step: int, end_step: int) -> list[RecordedRequest]:
        """Describe an ended request, one entry for each sample. Samples share the keys of the prompt.

        Samples that had ended before the request arrived are left out.
        """
        samples = [member for member in group.samples if member.index not in group.request.ended]
        return [self._sample(member, arrival_step, end_step) for member in samples]

    def _sample(self, sequence: EngineSequence, arrival_step: int, end_step: int) -> RecordedRequest:
        request = sequence.request
        given = len(request.samples[sequence.index])
        return RecordedRequest(
            number=sequence.id,
            arrival_step=arrival_step,
            end_step=end_step,
            keys=tuple(self._keys(sequence)),
            prompt_tokens=len(request.prompt) + given,
            output_tokens=sequence.generated - given,
            max_tokens=request.stopping.max_tokens - given,
            decoding=_decoding(request),
            priority=request.priority,
            finish=(sequence.finish or FinishReason.FAILED).name.lower(),
            request=sequence.group.id,
        )

    def _keys(self, sequence: EngineSequence) -> Iterator[int]:
        root = root_key("", self._secret + sequence.group.salt)
        keys = block_keys(root, sequence.tokens, self.settings.block_size)
        return (int.from_bytes(key[:_KEY_BYTES]) for key in keys)


def _decoding(request: Request) -> str:
    if request.beam_search:
        return "beam"
    return "greedy" if request.sampling.greedy else "sampled"
