"""What a record of requests is run with: tokens made up from its keys, and a runner that computes nothing."""

from array import array
from collections.abc import Sequence
from itertools import count

from engine.run.record import RecordedRequest
from engine.schedule.step_plan import Done, Sampled, StepPlan, Work

# It ends a request before its limit. Made-up tokens are never it.
STOP_TOKEN = 0


class SyntheticTokens:
    """Makes up tokens so that blocks of equal keys have equal tokens, and all others different ones.

    Every token of a block is the number of its key, in order of appearance. A rest that fills no block, of which no key
    is known, has a number of its own, and so is shared with nobody.
    """

    def __init__(self, block_size: int) -> None:
        """Begin for a record of this block size, in tokens."""
        self._block_size = block_size
        self._numbers: dict[int, int] = {}
        self._next = count(STOP_TOKEN + 1)

    def of(self, request: RecordedRequest) -> "array[int]":
        """Return the tokens of prompt and output."""
        length = request.prompt_tokens + request.output_tokens
        tokens = array("i")
        for key in request.keys[: length // self._block_size]:
            if key not in self._numbers:
                self._numbers[key] = next(self._next)
            tokens.extend([self._numbers[key]] * self._block_size)
        tokens.extend([next(self._next)] * (length - len(tokens)))
        return tokens


class ReplayRunner:
    """Executes plans by looking up the tokens that come next; it computes nothing.

    A request is known by the seed of its sampling: its place in `tokens`.
    """

    def __init__(self) -> None:
        self._tokens: dict[int, tuple[Sequence[int], bool]] = {}

    def add(self, seed: int, tokens: Sequence[int], *, stops: bool) -> None:
        """Say what the request of this seed consists of, its output included; if it `stops`, before its limit."""
        self._tokens[seed] = (tokens, stops)

    def remove(self, seed: int) -> None:
        """The request of this seed has ended."""
        del self._tokens[seed]

    def launch(self, plan: StepPlan) -> Done:
        """Bring the next token of each work that samples."""
        return Done([Sampled(self._token(work)) for work in plan.work if work.samples])

    def _token(self, work: Work) -> int:
        tokens, stops = self._tokens[work.sampling.seed]
        return STOP_TOKEN if stops and work.end == len(tokens) - 1 else tokens[work.end]
