"""The dashboard and Prometheus' configuration, held against a real Prometheus that watches a real Quire at work."""

import math
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.dashboard import Query, queries
from tests.load import prompt_request, run_streams
from tests.prometheus import CONFIGURATION, NoPrometheus, RunningPrometheus, prometheus_folder
from tests.running_quire import start_quire

STREAMS = 16
POOL_BLOCKS = 40
LEAST_SCRAPES = 8
BEGINNING = "The library of a small town opens at nine and closes at six. Today somebody asks: "
QUESTIONS = ("where is the atlas", "who wrote the letters", "when does it open", "what do sailors write home")


@dataclass(frozen=True)
class Watched:
    """A Prometheus after it watched the load, and when that was, in seconds since 1970."""

    prometheus: RunningPrometheus
    start: float
    end: float

    def series(self, expression: str) -> list[list[float]]:
        """The values of each series over the load, where there are any."""
        found = self.prometheus.query_range(expression, self.start, self.end)
        series = [[float(value) for _, value in one["values"]] for one in found]
        return [[value for value in values if not math.isnan(value)] for values in series]

    def most(self, expression: str) -> float:
        return max(max(values) for values in self.series(expression))

    def scrapes(self, metric: str) -> dict[float, list[float]]:
        """The values of a metric by the time of their scrape."""
        by_time: dict[float, list[float]] = {}
        for series in self.prometheus.query(f"{metric}[{math.ceil(time.time() - self.start)}s]"):
            for at, value in series["values"]:
                by_time.setdefault(at, []).append(float(value))
        return by_time


@pytest.fixture(scope="module")
def commands() -> Path:
    """The folder with prometheus and promtool."""
    try:
        return prometheus_folder()
    except NoPrometheus as reason:
        pytest.skip(f"needs Prometheus: {reason}")


@pytest.fixture(scope="module")
def watched(
    commands: Path, tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Watched]:
    """A tiny model under 16 streams that begin alike, in a pool that is too small for all of them."""
    quire = start_quire("--model", str(tiny_model("llama")), "--device-blocks", str(POOL_BLOCKS))
    targets = {name: url.split("/")[2] for name, url in quire.metrics_urls.items()}
    prometheus = RunningPrometheus(commands, tmp_path_factory.mktemp("prometheus"), targets)
    prometheus.wait_until("count(up == 1) == 3")
    prometheus.wait_until("quire_kv_pool_blocks")
    start = time.time()
    requests = [
        prompt_request(f"{BEGINNING}{QUESTIONS[number % 4]}, number {number}?", 48 + 4 * (number % 4))
        for number in range(2 * STREAMS + 4)
    ]
    while not prometheus.query(f"count_over_time(up[{math.ceil(time.time() - start)}s]) >= {LEAST_SCRAPES}"):
        run_streams(quire, requests, STREAMS)
    quire.settled_pool()
    yield Watched(prometheus, start, time.time())
    prometheus.close()
    assert quire.close() == 0


@pytest.mark.parametrize("query", queries(), ids=lambda query: f"{query.panel}: {query.legend}")
def test_every_query_of_every_panel_returns_data_under_load(watched: Watched, query: Query) -> None:
    series = watched.series(query.executable())
    assert series
    assert all(series)
    assert all(value >= 0 for values in series for value in values)


def test_the_states_of_the_blocks_sum_to_the_pool_at_every_scrape(watched: Watched) -> None:
    states, pool = watched.scrapes("quire_kv_blocks"), watched.scrapes("quire_kv_pool_blocks")
    assert len(states) >= 5
    assert states.keys() == pool.keys()
    assert {tuple(counts) for counts in pool.values()} == {(POOL_BLOCKS,)}
    assert [at for at, counts in states.items() if len(counts) != 4 or sum(counts) != POOL_BLOCKS] == []


def test_no_scrape_failed(watched: Watched) -> None:
    assert watched.series("count(up)")
    assert {value for values in watched.series("up") for value in values} == {1.0}


def test_what_the_load_did_is_seen(watched: Watched) -> None:
    """Queries that return data could all return zeros."""
    assert watched.most("quire_num_requests_running") >= STREAMS / 4
    assert watched.most("quire_num_requests_waiting") > 0
    assert watched.most("quire_kv_cache_usage_perc") >= 0.8
    assert watched.most("quire_kv_saved_blocks") >= STREAMS / 4
    assert watched.most("quire_prefix_cache_hits_total") > 0
    assert watched.most("quire_kv_evicted_blocks_total") > 0
    assert watched.most("quire_num_preemptions_total") > 0
    assert watched.most("quire_recomputed_tokens_total") > 0
    tokens_held = watched.series("quire_kv_held_tokens / (quire_kv_held_slots > 0)")
    assert 0.5 < max(map(max, tokens_held)) <= 1


def test_promtool_accepts_the_configuration(commands: Path) -> None:
    done = subprocess.run(
        [commands / "promtool", "check", "config", CONFIGURATION], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
