"""Requests as they come in."""

from dataclasses import dataclass
from enum import Enum

from engine.errors import InvalidRequest


class FinishReason(Enum):
    """Why a sequence ended."""

    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    FAILED = 4


class Failure(Enum):
    """What made a request fail."""

    STEP = 1
    BLOCK_MANAGER = 2
    DEADLINE = 3


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
    """A prompt to continue.

    `arrival` and `deadline` are in seconds of the engine's clock; with the class, the arrival makes the order key.
    `samples` has, for each sample wanted, the tokens that were generated before the request came here.
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    stopping: Stopping
    salt: bytes = b""
    priority: int = 0
    arrival: float = 0.0
    samples: tuple[tuple[int, ...], ...] = ((),)
    deadline: float | None = None


@dataclass(frozen=True)
class Capacity:
    """What one request can have at most: positions of the model, ids of its vocabulary, blocks of the pool."""

    context_tokens: int
    vocabulary_size: int
    block_size: int
    device_blocks: int
    host_blocks: int = 0

    def check(self, request: Request) -> None:
        """Raise InvalidRequest, naming the field and both numbers, when the request can never be served."""
        length, limit = len(request.prompt), request.stopping.max_tokens
        if not length:
            raise InvalidRequest("prompt is empty", "prompt")
        if limit < 1:
            raise InvalidRequest(f"stopping.max_tokens is {limit}, it must be at least 1", "stopping.max_tokens")
        self._check_ids(request.prompt, "prompt.token_ids")
        for generated in request.samples:
            self._check_ids(generated, "samples.generated_token_ids")
            if len(generated) >= limit:
                raise InvalidRequest(
                    f"{len(generated)} tokens are generated already, stopping.max_tokens is {limit}",
                    "samples.generated_token_ids",
                )
        if length + limit > self.context_tokens:
            raise InvalidRequest(
                f"prompt has {length} tokens and stopping.max_tokens is {limit}, together {length + limit}; "
                f"the model's context has {self.context_tokens}",
                "stopping.max_tokens",
            )
        if (blocks := self.most_blocks(request)) > self.device_blocks:
            samples = f" for each of {len(request.samples)} samples" if len(request.samples) > 1 else ""
            raise InvalidRequest(
                f"prompt has {length} tokens and stopping.max_tokens is {limit}{samples}, which takes {blocks} blocks; "
                f"the pool has {self.device_blocks}",
                "stopping.max_tokens",
            )

    def most_blocks(self, request: Request) -> int:
        """Return how many blocks a request can need at once: its samples share the whole blocks of the prompt."""
        shared = len(request.prompt) // self.block_size
        whole = -(-(len(request.prompt) + request.stopping.max_tokens - 1) // self.block_size)
        return shared + len(request.samples) * (whole - shared)

    def _check_ids(self, token_ids: tuple[int, ...], field: str) -> None:
        outside = next((token for token in token_ids if not 0 <= token < self.vocabulary_size), None)
        if outside is not None:
            raise InvalidRequest(f"{field} has {outside}, the vocabulary has {self.vocabulary_size} tokens", field)


OrderKey = tuple[int, float, int]
