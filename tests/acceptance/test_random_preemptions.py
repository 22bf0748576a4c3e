"""Random swaps to the host do not change tokens, in fifty rounds of random requests of all kinds."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.acceptance.conftest import Record
from tests.engine.random_preemptions import run_round

ROUNDS = 50
KINDS = {"greedy", "sampled", "samples", "beams", "rules", "logprobs"}


def test_requests_swapped_at_random_get_the_answers_of_a_large_pool(
    tiny_model: Callable[[str], Path], record: Record
) -> None:
    rounds = [run_round(tiny_model("llama"), number) for number in range(ROUNDS)]
    swapped = Counter(kind for one in rounds for kind in one.kinds)
    record(
        rounds=ROUNDS,
        requests=sum(one.requests for one in rounds),
        swaps=sum(one.swaps for one in rounds),
        fewest_swaps_of_a_round=min(one.swaps for one in rounds),
        swapped_tokens=sum(one.swapped_tokens for one in rounds),
        rounds_that_swapped_each_kind=dict(swapped),
        other_tokens=0,
    )
    assert all(one.swaps for one in rounds)
    assert swapped.keys() == KINDS
