"""Requests as they come in."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from blocks import blocks_for
from engine.constraint import Constraint
from engine.errors import InvalidRequest

# So many of the most likely tokens can be asked for at each position.
MAX_LOGPROBS = 20
# In bytes. Gateways make ids of a tenant's name and a client's id, and salts likewise; block managers store both.
MAX_REQUEST_ID_BYTES = 512
MAX_SALT_BYTES = 480
# The largest length_penalty, and the negative of the smallest: no length that a model can have leaves a double with it.
MAX_LENGTH_PENALTY = 10.0
# The continuations of one beam that a search may look at: more would hold up every step that it takes part in.
MAX_CANDIDATES = 4096


class FinishReason(Enum):
    """Why a sequence ended. No request ends with PRUNED: that is a beam that others outdid."""

    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    FAILED = 4
    PRUNED = 5


class Failure(Enum):
    """What made a request fail."""

    STEP = 1
    BLOCK_MANAGER = 2
    DEADLINE = 3
    CONSTRAINT = 4
    DEADLINE_QUEUED = 5
    REQUEST = 6  # what is done for it alone raised


@dataclass(frozen=True)
class Sampling:
    """How one token is chosen from the logits: divided by temperature, filtered by min_p, then top_k, then top_p.

    0 turns top_k off.
    """

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
class BeamSearch:
    """Keeps the `width` likeliest continuations instead of sampling.

    An answer's log-probability is divided by its length to the power of `length_penalty`, which is from
    -MAX_LENGTH_PENALTY to MAX_LENGTH_PENALTY. With `early_stopping` the first `width` answers are taken; else the
    search goes on while the likeliest beam could still become one of them.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool = False


@dataclass(frozen=True)
class LogitRules:
    """Changes logits by what was already said, or by token id, before Sampling is looked at.

    The defaults change nothing. engine.logit_rules says in which order they apply. `logit_bias` has pairs of a token id
    and what is added to its logit; `allowed_token_ids`, when not empty, are the only tokens that can be chosen.
    """

    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()

    @property
    def penalizes(self) -> bool:
        """Whether logits depend on the tokens so far."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0


NO_RULES = LogitRules()


@dataclass(frozen=True)
class Stopping:
    """When a sequence ends: after `max_tokens`, or with one of `token_ids`.

    Before `min_tokens` none of those is chosen, nor of `ignored_token_ids`: end-of-sequence tokens that do not end it.
    """

    max_tokens: int
    token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    ignored_token_ids: frozenset[int] = frozenset()

    def banned_after(self, generated: int) -> frozenset[int]:
        """Return the tokens that cannot be chosen after this many."""
        return self.token_ids | self.ignored_token_ids if generated < self.min_tokens else frozenset()


def candidates_per_beam(search: BeamSearch, stopping: Stopping) -> int:
    """Return how many continuations of each beam are looked at: even if all that can end do, `width` go on."""
    return max(2, 1 + len(stopping.token_ids)) * search.width


@dataclass(frozen=True)
class Request:
    """A prompt to continue.

    `arrival` and `deadline` are in seconds of the engine's clock; with the class, the arrival makes the order key.
    `samples` has, for each sample wanted, the tokens that were generated before the request came here, and `ended` the
    indices of those that ended there: nothing is generated for them.
    With `prefill_only` it ends when K and V of its prompt are computed, and no token is sampled.
    Log-probabilities are of each token generated, or of the prompt, and of so many of the most likely ones; None: none.
    With `beam_search` the samples are its best answers. `constraint` is the language that each sample must belong to.
    An `isolated` request is computed with no other in its batch until it has gained a token.
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
    ended: frozenset[int] = frozenset()
    isolated: bool = False

    @property
    def sequences(self) -> int:
        """Sequences that it runs at once."""
        return self.beam_search.width if self.beam_search else len(self.samples) - len(self.ended)


@dataclass(frozen=True)
class Capacity:
    """What one request can have at most: positions of the model, ids of its vocabulary, blocks of the pool.

    `pinned_blocks` of the device's are held by pins, or will be.
    """

    context_tokens: int
    vocabulary_size: int
    block_size: int
    device_blocks: int
    host_blocks: int = 0
    pinned_blocks: int = 0

    @property
    def unpinned_blocks(self) -> int:
        """Blocks that one request can have at most."""
        return self.device_blocks - self.pinned_blocks

    def check(self, request: Request) -> None:
        """Raise InvalidRequest, naming the field and both numbers, when the request can never be served."""
        length, limit = len(request.prompt), request.stopping.max_tokens
        _check_names(request)
        if not length:
            raise InvalidRequest("prompt is empty", "prompt")
        _require(limit >= 1, "stopping.max_tokens", limit, "at least 1")
        self._check_ids(request.prompt, "prompt.token_ids")
        self._check_samples(request)
        _check_sampling(request.sampling)
        self._check_rules(request.logit_rules)
        self._check_min_tokens(request)
        if request.beam_search is not None:
            _check_beam_search(request, request.beam_search)
        _check_constraint(request)
        _check_logprobs(request.logprobs, "logprobs")
        _check_logprobs(request.prompt_logprobs, "prompt_logprobs")
        if length + limit > self.context_tokens:
            raise InvalidRequest(
                f"prompt has {length} tokens and stopping.max_tokens is {limit}, together {length + limit}; "
                f"the model's context has {self.context_tokens}",
                "stopping.max_tokens",
            )
        if (blocks := self.max_blocks(request)) > self.unpinned_blocks:
            each = "beams" if request.beam_search else "samples"
            samples = f" for each of {request.sequences} {each}" if request.sequences > 1 else ""
            raise InvalidRequest(
                f"prompt has {length} tokens and stopping.max_tokens is {limit}{samples}, which takes {blocks} blocks; "
                f"the pool has {self.device_blocks}"
                + (f", {self.pinned_blocks} of them pinned" * bool(self.pinned_blocks)),
                "stopping.max_tokens",
            )

    def max_blocks(self, request: Request) -> int:
        """Return how many blocks a request can need at once: its samples share the whole blocks of the prompt."""
        shared = len(request.prompt) // self.block_size
        whole = blocks_for(len(request.prompt) + request.stopping.max_tokens - 1, self.block_size)
        return shared + request.sequences * (whole - shared)

    def _check_samples(self, request: Request) -> None:
        """Check what was generated before: a sample that goes on must have been able to."""
        if not request.sequences and request.samples:
            raise InvalidRequest("all samples have ended, nothing is left to generate", "samples.ended")
        stopping = request.stopping
        for index, generated in enumerate(request.samples):
            self._check_ids(generated, "samples.generated_token_ids")
            if index in request.ended:
                continue
            if len(generated) >= stopping.max_tokens:
                raise InvalidRequest(
                    f"{len(generated)} tokens are generated already, stopping.max_tokens is {stopping.max_tokens}",
                    "samples.generated_token_ids",
                )
            if stop := stopping.token_ids.intersection(generated):
                raise InvalidRequest(
                    f"{min(stop)} is among the tokens of sample {index}, and ends it; samples.ended does not say so",
                    "samples.generated_token_ids",
                )

    def _check_rules(self, rules: LogitRules) -> None:
        for name in ("repetition_penalty", "frequency_penalty", "presence_penalty"):
            value = getattr(rules, name)
            _require(math.isfinite(value), f"logit_rules.{name}", value, "a finite number")
        penalty = rules.repetition_penalty
        _require(penalty > 0, "logit_rules.repetition_penalty", penalty, "above 0")
        for token, bias in rules.logit_bias:
            _require(math.isfinite(bias), f"logit_rules.logit_bias[{token}]", bias, "a finite number")
        self._check_ids((token for token, _ in rules.logit_bias), "logit_rules.logit_bias")
        self._check_ids(rules.allowed_token_ids, "logit_rules.allowed_token_ids")

    def _check_min_tokens(self, request: Request) -> None:
        """Check also that what they bar leaves a token to choose."""
        least, limit = request.stopping.min_tokens, request.stopping.max_tokens
        _require(0 <= least <= limit, "stopping.min_tokens", least, f"from 0 to stopping.max_tokens, {limit}")
        allowed, banned = request.logit_rules.allowed_token_ids, request.stopping.banned_after(0)
        if banned and all(token in banned for token in allowed or range(self.vocabulary_size)):
            field = "logit_rules.allowed_token_ids" if allowed else "stopping.min_tokens"
            raise InvalidRequest(
                f"{field} leaves nothing to choose: stopping.min_tokens is {least}, and until then no "
                "end-of-sequence or stop token can be chosen",
                field,
            )

    def _check_ids(self, token_ids: Iterable[int], field: str) -> None:
        outside = next((token for token in token_ids if not 0 <= token < self.vocabulary_size), None)
        if outside is not None:
            raise InvalidRequest(f"{field} has {outside}, the vocabulary has {self.vocabulary_size} tokens", field)


def _require(holds: bool, field: str, value: object, bounds: str) -> None:
    if not holds:
        raise InvalidRequest(f"{field} is {value}, it must be {bounds}", field)


def _check_names(request: Request) -> None:
    for field, size, most in (
        ("request_id", len(request.request_id.encode()), MAX_REQUEST_ID_BYTES),
        ("salt", len(request.salt), MAX_SALT_BYTES),
    ):
        if size > most:
            raise InvalidRequest(f"{field} has {size} bytes, the most is {most}", field)


def _check_sampling(sampling: Sampling) -> None:
    temperature, top_k, top_p, min_p = sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
    holds = 0 <= temperature < math.inf
    _require(holds, "sampling.temperature", temperature, "a finite number that is not negative")
    _require(top_k >= 0, "sampling.top_k", top_k, "at least 0")
    _require(0 < top_p <= 1, "sampling.top_p", top_p, "above 0 and at most 1")
    _require(0 <= min_p <= 1, "sampling.min_p", min_p, "from 0 to 1")


def _check_beam_search(request: Request, search: BeamSearch) -> None:
    """Check the search, and that nothing is asked for that it cannot give."""
    _require(search.width >= 1, "beam_search.width", search.width, "at least 1")
    bounds = f"from {-MAX_LENGTH_PENALTY:g} to {MAX_LENGTH_PENALTY:g}"
    holds = abs(search.length_penalty) <= MAX_LENGTH_PENALTY  # a NaN is not either
    _require(holds, "beam_search.length_penalty", search.length_penalty, bounds)
    if (candidates := candidates_per_beam(search, request.stopping)) > MAX_CANDIDATES:
        raise InvalidRequest(
            f"stopping.stop_token_ids and end-of-sequence tokens are {len(request.stopping.token_ids)}: with "
            f"beam_search.width {search.width} there are {candidates} continuations of each beam to look at, the most "
            f"is {MAX_CANDIDATES}",
            "stopping.stop_token_ids",
        )
    if not 1 <= len(request.samples) <= search.width:
        raise InvalidRequest(
            f"sampling.sample_count is {len(request.samples)}, beam_search.width is {search.width}: "
            "a search has at most as many answers as beams",
            "sampling.sample_count",
        )
    if any(request.samples) or request.ended:
        raise InvalidRequest("a beam search begins at its prompt, not with generated tokens", "samples")
    if not request.sampling.greedy:
        raise InvalidRequest(
            f"sampling.temperature is {request.sampling.temperature}, it cannot be combined with beam_search",
            "sampling.temperature",
        )
    if request.logprobs is not None:
        raise InvalidRequest("logprobs cannot be combined with beam_search", "logprobs")


def _check_constraint(request: Request) -> None:
    """Check that nothing else decides what can be chosen: together they could leave nothing."""
    if request.constraint is None:
        return
    if request.logit_rules.allowed_token_ids:
        raise InvalidRequest(
            "logit_rules.allowed_token_ids cannot be given together with constraint", "logit_rules.allowed_token_ids"
        )
    if request.stopping.ignored_token_ids:
        raise InvalidRequest(
            "stopping.ignore_eos cannot be given together with constraint: a complete output has to end",
            "stopping.ignore_eos",
        )


def _check_logprobs(count: int | None, field: str) -> None:
    _require(count is None or 0 <= count <= MAX_LOGPROBS, field, count, f"from 0 to {MAX_LOGPROBS}")


OrderKey = tuple[int, float, int]
