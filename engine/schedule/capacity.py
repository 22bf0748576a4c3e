"""What fits a model and a pool, and the checks of a request's fields by it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from blocks import WindowKind, blocks_for, counted
from engine.bad_words import MAX_LENGTH, MAX_SEQUENCES
from engine.errors import InvalidRequest
from engine.schedule.request import BeamSearch, LogitRules, Request, candidates_per_beam

# Continuations compared for each beam; more would slow down every step of the search.
MAX_CANDIDATES = 4096


class Demand(NamedTuple):
    """The most `blocks` that a request can hold of a `kind` (empty: kind 0), beside the pool's `total` and `pinned`."""

    kind: str
    blocks: int
    total: int
    pinned: int

    @property
    def left(self) -> int:
        """Number of blocks available to the request."""
        return self.total - self.pinned

    @property
    def name(self) -> str:
        """The blocks and their kind, such as `12 blocks of kind window-40`."""
        return counted(self.blocks, "block") + (f" of kind {self.kind}" if self.kind else "")


@dataclass(frozen=True)
class Capacity:
    """Limits of one request: positions of the model, ids of its vocabulary, blocks of the pool.

    `pinned_blocks` are held by pins, now or later. `caches_prefixes`: the block manager finds computed prefixes.
    `windows` are the kinds of blocks after kind 0, in which a sequence computes at most `step_tokens` at once;
    `pinned_in_windows` are the blocks of each that pins hold, none if it is empty.
    """

    context_tokens: int
    vocabulary_size: int
    block_size: int
    device_blocks: int
    host_blocks: int = 0
    pinned_blocks: int = 0
    caches_prefixes: bool = True
    windows: tuple[WindowKind, ...] = ()
    step_tokens: int = 0
    pinned_in_windows: tuple[int, ...] = ()

    @property
    def unpinned_blocks(self) -> int:
        """Number of blocks available to one request."""
        return self.device_blocks - self.pinned_blocks

    @property
    def unpinned_in_windows(self) -> tuple[int, ...]:
        """Number of blocks of each window kind available to one request."""
        pinned = self.pinned_in_windows or (0,) * len(self.windows)
        return tuple([kind.device_blocks - held for kind, held in zip(self.windows, pinned, strict=True)])

    def check(self, request: Request) -> None:
        """Raise InvalidRequest, naming the field, its value and its limit, if the request can never be served.

        It is checked already by the rules of its fields, which the contract has.
        """
        length, limit = len(request.prompt), request.stopping.max_tokens
        if not length:
            raise InvalidRequest("prompt must have at least 1 token, not 0", "prompt")
        _require(limit >= 0, "stopping.max_tokens", limit, "at least 0")
        self._check_ids(request.prompt, "prompt.token_ids")
        self._check_samples(request)
        self._check_rules(request.logit_rules)
        self._check_choice(request)
        if request.beam_search is not None:
            _check_beam_search(request, request.beam_search)
        prompt = f"prompt ({counted(length, 'token')})"
        if length + limit > self.context_tokens:
            raise InvalidRequest(
                f"{prompt} and stopping.max_tokens ({limit}) must be at most "
                f"{self.context_tokens} tokens (the model's context), not {length + limit}",
                "stopping.max_tokens" if length < self.context_tokens else "prompt",
            )
        if (demand := self.shortage(request, limit)) is not None:
            each = "beams" if request.beam_search else "samples"
            samples = f" for each of {request.sequences} {each}" if request.sequences > 1 else ""
            pinned = f", {demand.pinned} of them pinned" if demand.pinned else ""
            raise InvalidRequest(
                f"{prompt} and stopping.max_tokens ({limit}){samples} take {demand.name}; "
                f"the pool has {demand.total}{pinned}",
                "prompt" if self.shortage(request, min(limit, 1)) else "stopping.max_tokens",
            )

    def shortage(self, request: Request, max_tokens: int) -> Demand | None:
        """Return the demand of the first kind that is too small for a request with this limit, None if it fits."""
        return next((one for one in self._demands(request, max_tokens) if one.blocks > one.left), None)

    def max_blocks(self, request: Request) -> int:
        """Return the most blocks a request can hold at once. Its samples share the whole blocks of the prompt."""
        return self._blocks(request, request.stopping.max_tokens)

    def max_window_blocks(self, request: Request, kind: WindowKind) -> int:
        """Return the most blocks of a window kind that a request can hold at once."""
        return self._window_blocks(request, request.stopping.max_tokens, kind)

    def _demands(self, request: Request, max_tokens: int) -> Iterator[Demand]:
        yield Demand("", self._blocks(request, max_tokens), self.device_blocks, self.pinned_blocks)
        for kind, left in zip(self.windows, self.unpinned_in_windows, strict=True):
            blocks, total = self._window_blocks(request, max_tokens, kind), kind.device_blocks
            yield Demand(kind.name, blocks, total, total - left)

    def _blocks(self, request: Request, max_tokens: int) -> int:
        shared, whole = self._shared_and_whole(request, max_tokens)
        return shared + request.sequences * (whole - shared)

    def _window_blocks(self, request: Request, max_tokens: int, kind: WindowKind) -> int:
        shared, whole = self._shared_and_whole(request, max_tokens)
        alone = min(whole, kind.most_blocks(self.step_tokens, self.block_size))
        if request.sequences == 1:
            return alone
        # One sample may be so far behind another that it still sees what both share.
        decoding = min(whole, kind.most_blocks(self.block_size, self.block_size))
        return max(alone, min(shared, decoding) + request.sequences * min(decoding, whole - shared))

    def _shared_and_whole(self, request: Request, max_tokens: int) -> tuple[int, int]:
        """Return the blocks of the prompt that samples share, and all of one sample."""
        whole = blocks_for(max(1, len(request.prompt) + max_tokens - 1), self.block_size)
        return len(request.prompt) // self.block_size, whole

    def _check_samples(self, request: Request) -> None:
        if not request.sequences and request.samples:
            raise InvalidRequest("samples.ended must leave at least one sample to generate", "samples.ended")
        stopping = request.stopping
        for index, generated in enumerate(request.samples):
            self._check_ids(generated, "samples.generated_token_ids")
            if index in request.ended:
                continue
            if generated and len(generated) >= stopping.max_tokens:
                raise InvalidRequest(
                    "samples.generated_token_ids must have fewer than stopping.max_tokens "
                    f"({stopping.max_tokens}) tokens, not {len(generated)}",
                    "samples.generated_token_ids",
                )
            if stop := stopping.token_ids.intersection(generated):
                raise InvalidRequest(
                    f"samples.generated_token_ids of sample {index} has stop token {min(stop)}, "
                    f"so samples.ended must have {index}",
                    "samples.generated_token_ids",
                )

    def _check_rules(self, rules: LogitRules) -> None:
        self._check_ids((token for token, _ in rules.logit_bias), "logit_rules.logit_bias")
        self._check_ids(rules.allowed_token_ids, "logit_rules.allowed_token_ids")
        self._check_bad_words(rules.bad_words.sequences)

    def _check_bad_words(self, sequences: tuple[tuple[int, ...], ...]) -> None:
        field, count = "logit_rules.bad_words", len(sequences)
        if count > MAX_SEQUENCES:
            raise InvalidRequest(f"{field} must have at most {MAX_SEQUENCES} token sequences, not {count}", field)
        for one in sequences:
            if not 1 <= len(one) <= MAX_LENGTH:
                raise InvalidRequest(f"{field} must have words of 1 to {MAX_LENGTH} tokens, not {len(one)}", field)
            self._check_ids(one, field)

    def _check_choice(self, request: Request) -> None:
        """Check `min_tokens`, and that a token can be chosen while it bans the stop tokens."""
        least, limit = request.stopping.min_tokens, request.stopping.max_tokens
        _require(0 <= least <= limit, "stopping.min_tokens", least, f"between 0 and stopping.max_tokens ({limit})")
        rules, stops = request.logit_rules, request.stopping.banned_after(0)
        banned = stops | rules.bad_words.always
        allowed = rules.allowed_token_ids or range(self.vocabulary_size)
        if banned and all(token in banned for token in allowed):
            given = {
                "logit_rules.allowed_token_ids": bool(rules.allowed_token_ids),
                "logit_rules.bad_words": bool(rules.bad_words.always),
                "stopping.min_tokens": True,
            }
            field = next(name for name, is_given in given.items() if is_given)
            reasons = ["logit_rules.bad_words bans tokens"] * bool(rules.bad_words.always)
            if stops:
                reasons += [f"before stopping.min_tokens ({least}) no end-of-sequence or stop token can be chosen"]
            raise InvalidRequest(f"{field} leaves no token to choose: {', and '.join(reasons)}", field)
        if len(allowed) <= len(banned) + len(rules.bad_words.sequences):
            _check_dead_ends(request, frozenset(allowed) - rules.bad_words.always)

    def _check_ids(self, token_ids: Iterable[int], field: str) -> None:
        outside = next((token for token in token_ids if not 0 <= token < self.vocabulary_size), None)
        if outside is not None:
            raise InvalidRequest(f"{field} must be between 0 and {self.vocabulary_size - 1}, not {outside}", field)


def _require(holds: bool, field: str, value: object, bounds: str) -> None:
    if not holds:
        raise InvalidRequest(f"{field} must be {bounds}, not {value}", field)


def _check_beam_search(request: Request, search: BeamSearch) -> None:
    _require(request.generates, "stopping.max_tokens", request.stopping.max_tokens, "at least 1 with beam_search")
    if (candidates := candidates_per_beam(search, request.stopping)) > MAX_CANDIDATES:
        raise InvalidRequest(
            f"stopping.stop_token_ids has too many tokens: with beam_search.width {search.width} and "
            f"{len(request.stopping.token_ids)} stop and end-of-sequence tokens a search compares {candidates} "
            f"continuations of each beam, at most {MAX_CANDIDATES} are allowed",
            "stopping.stop_token_ids",
        )
    if not 1 <= len(request.samples) <= search.width:
        raise InvalidRequest(
            f"sampling.sample_count must be between 1 and beam_search.width ({search.width}), "
            f"not {len(request.samples)}",
            "sampling.sample_count",
        )
    if any(request.samples) or request.ended:
        raise InvalidRequest("samples must be empty with beam_search: a search starts at its prompt", "samples")


def _check_dead_ends(request: Request, choice: frozenset[int]) -> None:
    """Check that no output of the tokens of `choice` leads to a place where `bad_words` bans all of them."""
    words, least, stops = request.logit_rules.bad_words, request.stopping.min_tokens, request.stopping.banned_after(0)
    for end in (*words.dead_ends(choice), *words.dead_ends(choice - stops)):
        # Stop tokens are banned until `min_tokens`; an output that ends so has at least these tokens.
        if len(end) < least or choice <= words.banned_after(end, 0, len(end)):
            raise InvalidRequest(
                f"logit_rules.bad_words leaves no token to choose after {list(end)}", "logit_rules.bad_words"
            )
