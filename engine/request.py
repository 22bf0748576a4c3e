"""Requests as they come in, and sequences as they run."""

from dataclasses import dataclass, field
from enum import Enum

from engine.errors import InvalidRequest


class FinishReason(Enum):
    """Why a sequence ended."""

    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    FAILED = 4


class Failure(Enum):
    """What made a sequence fail."""

    STEP = 1
    BLOCK_MANAGER = 2


@dataclass(frozen=True)
class Sampling:
    """How one token is chosen from the logits; filters apply in the order of the fields. 0 turns top_k off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0.0


@dataclass(frozen=True)
class Stopping:
    """When a sequence ends: after `max_tokens`, or with one of `token_ids`."""

    max_tokens: int
    token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Request:
    """A prompt to continue. `arrival` is in seconds of the engine's clock; with the class it makes the order key."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    stopping: Stopping
    salt: bytes = b""
    priority: int = 0
    arrival: float = 0.0
    generated: tuple[int, ...] = ()


@dataclass(frozen=True)
class Capacity:
    """What one request can have at most: positions of the model, ids of its vocabulary, blocks of the pool."""

    context_tokens: int
    vocabulary_size: int
    block_size: int
    device_blocks: int

    def check(self, request: Request) -> None:
        """Raise InvalidRequest, naming the field and both numbers, when the request can never be served."""
        length, limit = len(request.prompt), request.stopping.max_tokens
        if not length:
            raise InvalidRequest("prompt is empty", "prompt")
        if limit < 1:
            raise InvalidRequest(f"stopping.max_tokens is {limit}, it must be at least 1", "stopping.max_tokens")
        self._check_ids(request.prompt, "prompt.token_ids")
        self._check_ids(request.generated, "samples.generated_token_ids")
        if len(request.generated) >= limit:
            raise InvalidRequest(
                f"{len(request.generated)} tokens are generated already, stopping.max_tokens is {limit}",
                "samples.generated_token_ids",
            )
        if length + limit > self.context_tokens:
            raise InvalidRequest(
                f"prompt has {length} tokens and stopping.max_tokens is {limit}, together {length + limit}; "
                f"the model's context has {self.context_tokens}",
                "stopping.max_tokens",
            )
        blocks = -(-(length + limit - 1) // self.block_size)
        if blocks > self.device_blocks:
            raise InvalidRequest(
                f"prompt has {length} tokens and stopping.max_tokens is {limit}, which takes {blocks} blocks; "
                f"the pool has {self.device_blocks}",
                "stopping.max_tokens",
            )

    def _check_ids(self, token_ids: tuple[int, ...], field: str) -> None:
        outside = next((token for token in token_ids if not 0 <= token < self.vocabulary_size), None)
        if outside is not None:
            raise InvalidRequest(f"{field} has {outside}, the vocabulary has {self.vocabulary_size} tokens", field)


OrderKey = tuple[int, float, int]


@dataclass(eq=False)
class Sequence:
    """A request on its way: its tokens, and the engine's own copy of its block table.

    `computed` counts the tokens whose K and V are in the cache, seen to be written; `room` those that its blocks can
    take; `committed` the leading blocks that have keys; `told` the computed tokens that the block manager knows of.
    """

    id: int
    request: Request
    tokens: list[int]
    table: list[int] = field(default_factory=list)
    room: int = 0
    computed: int = 0
    committed: int = 0
    told: int = 0
    started: bool = False
    cached_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    lost_tokens: int = 0
    scheduled_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    finish: FinishReason | None = None
    stop_token: int | None = None
    failure: Failure | None = None
    detail: str = ""

    @classmethod
    def of(cls, number: int, request: Request) -> "Sequence":
        """Make the sequence of a request, with what was generated before it came here."""
        return cls(number, request, [*request.prompt, *request.generated])

    @property
    def key(self) -> OrderKey:
        """Smallest is served first, largest is preempted first; kept through preemption."""
        return (self.request.priority, self.request.arrival, self.id)

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def remaining(self) -> int:
        """Tokens that are known but not computed: 1 while decoding, more while the prompt is prefilled."""
        return len(self.tokens) - self.computed

    @property
    def most_slots(self) -> int:
        """Slots it can need at most: the last token generated is never fed back."""
        return len(self.request.prompt) + self.request.stopping.max_tokens - 1

    def append(self, token: int) -> None:
        """Take a sampled token, and finish where it ends the sequence."""
        self.tokens.append(token)
        stopping = self.request.stopping
        if token in stopping.token_ids:
            self.finish, self.stop_token = FinishReason.STOP, token
        elif self.generated >= stopping.max_tokens:
            self.finish = FinishReason.LENGTH

    def lose_blocks(self) -> None:
        """Forget the table: everything has to be computed again."""
        self.lost_tokens = max(self.lost_tokens, self.computed)
        self.table = []
        self.room = self.computed = self.committed = self.told = 0
