"""Records of requests: when each arrived, which blocks it shares with which others, and how long it became.

No token ids are in it: blocks are named by keys, hashes chained over a secret of the record, the request's salt, and
all tokens up to the block's end. Who does not know the secret, which is not in the record, cannot tell by guessing
which tokens a key stands for. Files and clocks belong to whoever writes the record and reads it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from blocks import block_keys, root_key
from engine.schedule.limits import Preemption
from engine.schedule.request import FinishReason, Request
from engine.schedule.scheduler import Scheduler
from engine.schedule.sequence_group import Group
from engine.schedule.sequence_group import Sequence as EngineSequence

# Of a key: 64 bits, enough to tell apart what one record can hold.
_KEY_BYTES = 8


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
    keys: Sequence[int]
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    decoding: str
    priority: int
    finish: str

    @property
    def possible(self) -> bool:
        """Whether a request can have these lengths."""
        known = self.prompt_tokens + self.output_tokens
        return self.prompt_tokens > 0 <= self.output_tokens <= self.max_tokens and known >= len(self.keys)


class RequestsRecord:
    """Describes the requests of one scheduler when they have ended."""

    def __init__(self, scheduler: Scheduler, secret: bytes) -> None:
        """Begin a record of this scheduler's requests. `secret` is random, and known to nobody else."""
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

    def ended(self, group: Group, arrival_step: int, end_step: int) -> list[RecordedRequest]:
        """Describe a request that ended, each sample for itself: they have the keys of the prompt in common.

        What had ended before the request came here is left out.
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
        )

    def _keys(self, sequence: EngineSequence) -> Iterator[int]:
        root = root_key("", self._secret + sequence.group.salt)
        keys = block_keys(root, sequence.tokens, self.settings.block_size)
        return (int.from_bytes(key[:_KEY_BYTES]) for key in keys)


def _decoding(request: Request) -> str:
    if request.beam_search:
        return "beam"
    return "greedy" if request.sampling.greedy else "sampled"
