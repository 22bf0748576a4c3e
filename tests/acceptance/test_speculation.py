"""Engines that propose tokens give the answers of engines that do not, preempted both ways, and after failovers."""

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from quire.v1 import gateway_pb2
from tests.acceptance.conftest import Record
from tests.faults import Processes
from tests.running.failover import NAMES, Failing, check_equal, failovers, kill, streams
from tests.running_quire import Answer
from tests.scrape import Scrape

STREAMS, TOKENS = 24, 80
ROUNDS = 3
MAX_SECONDS = 120
WAYS = {
    "in a large pool": ("--device-blocks", "1024"),
    "recomputed": ("--device-blocks", "60", "--preemption", "recompute"),
    "swapped": ("--device-blocks", "60", "--preemption", "swap", "--host-blocks", "400"),
}


def repetitive(salt: str) -> list[gateway_pb2.GenerateRequest]:
    """Make requests of all kinds; most choose among three tokens of their prompt, so that n-grams occur again."""
    requests = streams(STREAMS, TOKENS, salt)
    for number, request in enumerate(requests):
        if number % 8 < 4:  # not guided, no bad words, no beams
            request.logit_rules.allowed_token_ids.extend(request.prompt.token_ids.ids[:3])
            for field in ("repetition_penalty", "frequency_penalty", "presence_penalty"):
                if number % 8:
                    request.logit_rules.ClearField(field)
    return requests


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    processes = Processes()
    yield processes
    assert processes.end() == []


@pytest.fixture(scope="module")
def start(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, processes: Processes
) -> Callable[[Sequence[str]], Failing]:
    def start(options: Sequence[str]) -> Failing:
        options = ("--dtype", "float32", *options)
        return Failing(tmp_path_factory.mktemp("s"), str(tiny_model("llama")), processes.keep, options)

    return start


@pytest.fixture(scope="module")
def plain(start: Callable[[Sequence[str]], Failing]) -> list[Answer]:
    services = start(WAYS["in a large pool"])
    running = services.run(repetitive("plain"), MAX_SECONDS)
    assert running.codes() == {}
    assert services.close() == [0, 0]
    return running.answers


@pytest.mark.parametrize("way", WAYS)
def test_answers_with_proposals_equal_those_without(
    start: Callable[[Sequence[str]], Failing], plain: list[Answer], way: str, record: Record
) -> None:
    services = start((*WAYS[way], "--speculate-ngram", "8"))
    failed_over = 0
    for round_number in range(ROUNDS):
        services.mend()
        running = services.run(repetitive(f"{way} {round_number}"), MAX_SECONDS)
        if round_number:
            draw = random.Random(round_number)
            running.wait_for_tokens(draw.randrange(STREAMS * TOKENS // 2))
            kill(services, draw)
        assert running.codes() == {}
        check_equal(running.answers, plain)
        services.check_that_nothing_is_left()
        failed_over += failovers(running.answers)
        if not round_number:
            shown = [Scrape.of(services.engines[name].metrics_url) for name in NAMES]
    counted = {
        name: sum(one.value(f"quire_{name}_total") for one in shown)
        for name in ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens", "num_preemptions")
    }
    excluded = {
        reason: sum(one.values("quire_spec_decode_num_requests_excluded_total", "reason")[reason] for one in shown)
        for reason in ("beam_search", "penalties", "guided")
    }
    record(
        rounds=ROUNDS, streams=ROUNDS * STREAMS, failed_over=failed_over, excluded=excluded, other_tokens=0, **counted
    )
    assert 0 < counted["spec_decode_num_accepted_tokens"] < counted["spec_decode_num_draft_tokens"]
    assert (counted["num_preemptions"] > 0) == (way != "in a large pool")
    assert all(excluded.values())
    assert failed_over > 0
    assert services.close() == [0, 0]
