"""Requests as submitted."""

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from engine.bad_words import NO_BAD_WORDS, BadWords
from engine.constraint import Constraint

# Most likely tokens returned for each position.
MAX_LOGPROBS = 20


class FinishReason(Enum):
    """Why a sequence ended. PRUNED is for beams only, never for a request."""

    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    FAILED = 4
    PRUNED = 5


class Failure(Enum):
    """Why a request failed."""

    STEP = 1
    BLOCK_MANAGER = 2
    DEADLINE = 3
    CONSTRAINT = 4
    DEADLINE_QUEUED = 5
    REQUEST = 6  # an exception raised for this request alone


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of one token: logits are divided by temperature, then filtered.

    The filters are top_n_sigma, min_p, top_k and top_p, in this order; a top_n_sigma or top_k of 0 turns it off.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    top_n_sigma: float = 0.0

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is chosen."""
        return self.temperature == 0.0


@dataclass(frozen=True)
class BeamSearch:
    """Keeps the `width` most likely continuations instead of sampling.

    An answer's log-probability is divided by its length to the power of `length_penalty`, from -10 to 10. With
    `early_stopping` the search ends with the first `width` answers. Otherwise it continues while the most likely beam
    could still become an answer.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool = False


@dataclass(frozen=True)
class LogitRules:
    """Changes to logits, by earlier tokens or by token id, applied before Sampling. The defaults change nothing.

    engine.run.logit_rules defines their order. `logit_bias` has pairs of a token id and the bias added to its logit.
    Only `allowed_token_ids` can be chosen unless it is empty, and nothing that completes one of `bad_words`.
    """

    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: BadWords = NO_BAD_WORDS

    @cached_property
    def penalizes(self) -> bool:
        """Whether logits change with each earlier token."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0


NO_RULES = LogitRules()


@dataclass(frozen=True)
class Stopping:
    """When a sequence ends: after `max_tokens`, or with one of `token_ids`. With `max_tokens` 0 nothing is generated.

    Before `min_tokens`, neither these nor `ignored_token_ids` (end-of-sequence tokens that do not end the sequence) are
    chosen.
    """

    max_tokens: int
    token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    ignored_token_ids: frozenset[int] = frozenset()

    def banned_after(self, generated: int) -> frozenset[int]:
        """Return the tokens that cannot be chosen after `generated` tokens."""
        return self.token_ids | self.ignored_token_ids if generated < self.min_tokens else frozenset()


def candidates_per_beam(search: BeamSearch, stopping: Stopping) -> int:
    """Return the number of continuations compared for each beam.

    It is large enough that `width` unfinished ones remain if all stop tokens are among them.
    """
    return max(2, 1 + len(stopping.token_ids)) * search.width


@dataclass(frozen=True)
class Request:
    """A prompt to continue.

    `arrival` and `deadline` are in seconds of the engine's clock. Priority and arrival form the order key.

    `samples` has the tokens already generated for each sample, as after a failover. `ended` has the indices of samples
    that have ended; nothing is generated for them. With `beam_search` the samples are its best answers.

    `prefill_only` ends the request when K and V of its prompt are computed, without sampling. Blocks of a `scratch` one
    get no keys.

    `logprobs` and `prompt_logprobs` are the number of most likely tokens returned for each generated or prompt token,
    besides the token itself; None returns no log-probabilities.

    `constraint` applies to each sample. An `isolated` request is alone in its batch until it has gained a token.
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
    logit_rules: LogitRules = NO_RULES
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    beam_search: BeamSearch | None = None
    constraint: Constraint | None = None
    prefill_only: bool = False
    scratch: bool = False
    ended: frozenset[int] = frozenset()
    isolated: bool = False

    @property
    def sequences(self) -> int:
        """Number of sequences that it runs at the same time. Samples without tokens are one sequence, the prompt."""
        if self.beam_search:
            return self.beam_search.width
        live = len(self.samples) - len(self.ended)
        return live if self.generates else min(live, 1)

    @cached_property
    def generates(self) -> bool:
        """Whether tokens are generated. Otherwise the request ends when its prompt is computed."""
        return self.stopping.max_tokens > 0 and not self.prefill_only

    @cached_property
    def prompt_slots(self) -> int:
        """Number of prompt tokens that are computed before the first token is sampled, or before the request ends.

        The last token of a sequence is never computed: if nothing is generated, that of the prompt, unless it is alone.
        """
        return len(self.prompt) if self.stopping.max_tokens else max(1, len(self.prompt) - 1)

    @cached_property
    def longest(self) -> int:
        """Most tokens of a sequence, with its prompt."""
        return len(self.prompt) + self.stopping.max_tokens

    @cached_property
    def has_rules(self) -> bool:
        """Whether rules may change the logits of a token."""
        return self.logit_rules != NO_RULES or self.stopping.min_tokens > 0 or self.constraint is not None

    @cached_property
    def runs_ahead(self) -> bool:
        """Whether its next step can be planned before its last token is known.

        With penalties only if the sampler counts tokens itself, see `Sampler.counts_tokens`.
        """
        return not (self.constraint or self.beam_search)


OrderKey = tuple[int, float, int]
