"""Engines killed up to a hundred times under load, some with their KV manager: what they had computed stays.

Memory that outlives them is that of `quire serve`, which starts them again. Each round of streams has its own salt, so
that prompts are computed in every round.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.acceptance.conftest import Record
from tests.acceptance.repetitions import repetitions
from tests.faults import Streams, wait_until
from tests.load import slow_request
from tests.running_quire import START_SECONDS, RunningQuire, start_quire
from tests.scrape import Scrape
from tests.services.random_load import (
    BLOCK_SIZE,
    BLOCKS,
    Outcomes,
    check_against_those_alone,
    check_that_nothing_is_left,
    run_errands,
)

ENGINES_KILLED = repetitions(60)
ALL_KILLED = repetitions(20)
MIXED_KILLS = repetitions(40)
STREAMS = 8
TOKENS = 60
PROMPT_TOKENS = 300
SIZE = 16
# A slow request takes at least 20 ms a token, and commits of generated blocks wait for at most a second.
UNCOMMITTED_TOKENS = 55
COMMITTED = 3
# Of the mixed load, between two kills.
LEAST_ENDS, MOST_ENDS = 30, 60
ARRIVAL_SECONDS = 0.1  # of a request that was sent
RESTARTS = ("--max-restarts", "1000", "--restart-reset-seconds", "0")


@pytest.fixture(scope="module")
def served(tiny_model: Callable[[str], Path]) -> Iterator[RunningQuire]:
    pool = ("--device-blocks", "2048", "--host-blocks", "64", "--dtype", "float32", "--threads", "1")
    one = start_quire("--model", str(tiny_model("llama")), *pool, *RESTARTS)
    yield one
    assert one.close() == 0


@pytest.fixture(scope="module")
def tiny_pool(tiny_model: Callable[[str], Path]) -> Iterator[RunningQuire]:
    tiers = ("--device-blocks", str(BLOCKS), "--host-blocks", str(BLOCKS), "--block-size", str(BLOCK_SIZE))
    limits = ("--max-sequences", "24", "--threads", "1", "--dtype", "float32", "--preemption", "auto")
    one = start_quire("--model", str(tiny_model("llama")), *tiers, *limits, *RESTARTS, "--failovers", "100")
    yield one
    assert one.close() == 0


def kill(quire: RunningQuire, *services: str) -> None:
    """Kill services within a few milliseconds, and wait until their successors serve."""
    seen = len(quire.output.lines)
    running = quire.children()
    for service in services:
        psutil.Process(running[service]).kill()
    for service in services:
        quire.output.wait_for(f"{service} is ready", START_SECONDS, seen)
    quire.output.wait_for("serves tiny-llama", START_SECONDS, seen)
    # Another port.
    shown = quire.output.wait_for("engine shows its metrics at ", START_SECONDS, seen)
    quire.metrics_urls["engine"] = shown.split(" at ")[1]


def streams_of(quire: RunningQuire, salt: str) -> Streams:
    draw = random.Random(0)
    requests = [slow_request("", TOKENS) for _ in range(STREAMS)]
    for request in requests:
        request.prompt.token_ids.ids.extend(draw.randrange(5, 200) for _ in range(PROMPT_TOKENS))
        request.cache.salt = salt
    return Streams(quire.gateway, requests)


@pytest.mark.parametrize(
    ("services", "rounds"),
    [(("engine",), ENGINES_KILLED), (("kvmanager", "engine"), ALL_KILLED)],
    ids=["engine", "both"],
)
def test_a_kill_costs_no_token_and_no_whole_block(
    served: RunningQuire, services: tuple[str, ...], rounds: int, record: Record
) -> None:
    expected = streams_of(served, "undisturbed").tokens()
    most_computed, running, ready = 0.0, 0, []
    for number in range(rounds):
        draw = random.Random(f"{services} {number}")
        streams = streams_of(served, f"{services} {number}")
        # Every prompt is computed, and its commit is answered.
        wait_until(lambda streams=streams: all(len(one.token_ids) >= COMMITTED for one in streams.answers), "all run")
        streams.wait_for_tokens(draw.randrange(STREAMS, STREAMS * TOKENS * 2 // 3))
        running += streams.running()
        began = time.monotonic()
        kill(served, *services)
        ready.append(round(time.monotonic() - began, 2))
        assert streams.tokens() == expected
        pool = served.settled_pool()
        assert (pool.sequences, pool.device.held, pool.host.held) == (0, 0, 0)
        engine = Scrape.of(served.metrics_urls["engine"])
        cached = engine.value("quire_prompt_tokens_cached_total")
        computed = (engine.value("quire_prompt_tokens_total") - cached) / STREAMS
        most_computed = max(most_computed, computed)
        record(
            rounds=number + 1,
            streams_running_at_the_kill=running,
            most_tokens_computed_again_by_a_stream=most_computed,
            seconds_to_serve=ready,
            other_tokens=0,
            held_afterwards=0,
        )
        assert cached >= STREAMS * (PROMPT_TOKENS // SIZE * SIZE), "a prompt's whole block was computed again"
        assert computed <= SIZE + UNCOMMITTED_TOKENS


def test_kills_under_mixed_load_change_no_answer(tiny_pool: RunningQuire, record: Record) -> None:
    outcomes, numbers, open_to_new = Outcomes(), iter(range(1_000_000)), threading.Event()
    ended, running = False, set[int]()

    def client(_: int) -> None:
        while not ended:
            open_to_new.wait()  # without an engine, new requests are refused
            number = next(numbers)
            running.add(number)
            run_errands(tiny_pool, [number], outcomes, 1)
            running.discard(number)

    with ThreadPoolExecutor(24) as clients:
        work = [clients.submit(client, one) for one in range(24)]
        draw = random.Random(1)
        try:
            lost = set[int]()
            for _ in range(MIXED_KILLS):
                open_to_new.set()
                # A request that takes down three engines in a row is given up.
                wait_until(lambda lost=lost: not lost & running, "those that lost an engine end", 300)
                enough = sum(outcomes.ends.values()) + draw.randrange(LEAST_ENDS, MOST_ENDS)
                wait_until(lambda enough=enough: sum(outcomes.ends.values()) >= enough, "requests end", 300)
                open_to_new.clear()
                time.sleep(ARRIVAL_SECONDS)
                lost = set(running)
                kill(tiny_pool, "engine")
        finally:
            ended = True
            open_to_new.set()
        for one in work:
            one.result()
    engine = Scrape.of(tiny_pool.metrics_urls["engine"])
    record(
        kills=MIXED_KILLS,
        ends=outcomes.by_code(),
        kinds=outcomes.by_kind(),
        preempted=dict(outcomes.preempted),
        adopted_at_the_last_start=engine.values("quire_kept_blocks_adopted", "tier"),
        wrong=len(outcomes.faults),
    )
    assert outcomes.faults == []
    check_that_nothing_is_left(tiny_pool)
    check_against_those_alone(tiny_pool, outcomes)
