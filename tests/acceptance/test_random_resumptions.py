"""Resuming at another engine does not change tokens, in sixty rounds of random requests."""

from collections.abc import Callable
from pathlib import Path

from services.engine.guided.grammars import Vocabulary
from tests.acceptance.conftest import Record
from tests.engine.schedule.random_resumptions import END, VOCABULARY, run_round
from tests.engine.schedule.test_resuming import compiled

ROUNDS = 60


def test_requests_resumed_at_random_get_the_answers_of_undisturbed_ones(
    tiny_model: Callable[[str], Path], record: Record
) -> None:
    folder = tiny_model("llama")
    constraints = compiled(Vocabulary(folder, VOCABULARY, [END]))
    rounds = [run_round(folder, constraints, number) for number in range(ROUNDS)]
    record(
        rounds=ROUNDS,
        samples_that_had_ended=sum(one.ended for one in rounds),
        samples_begun_elsewhere=sum(one.begun for one in rounds),
        preempted_after_resuming=sum(one.preempted for one in rounds),
        found_in_the_cache=sum(one.cached for one in rounds),
        other_tokens=0,
    )
    assert all(sum(counts) > ROUNDS / 2 for counts in zip(*rounds, strict=True))
