"""The dashboards and Prometheus' configuration, held against a real Prometheus that watches a real Quire at work."""

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest

from bench.serving.dashboard import SHOWN
from tests.api_keys import Keyed, write_keys
from tests.deployment.dashboard import AFTER_FAULTS, Dashboard, Query, dashboards, queries
from tests.deployment.prometheus import ALERTS, RunningPrometheus
from tests.load import prompt_request
from tests.running_quire import CALL_SECONDS, Answer, RunningQuire

STREAMS = 16
POOL_BLOCKS = 40
HOST_BLOCKS = 16
LEAST_SCRAPES = 8
# Scrapes are a second apart, and may take as long.
SCRAPE_SECONDS = 1
# After this the load ends even if something has not been seen.
LOAD_SECONDS = 120
# What the load has to do, as queries that return something where it was seen to.
DOES = (
    f"quire_num_requests_running >= {STREAMS / 4}",
    "quire_num_requests_waiting > 0",
    "quire_kv_cache_usage_perc >= 0.6",
    f"quire_kv_saved_blocks >= {STREAMS / 4}",
    "quire_prefix_cache_hits_total > 0",
    "quire_kv_evicted_blocks_total > 0",
    "quire_num_preemptions_total > 0",
    "quire_recomputed_tokens_total > 0",
    'quire_kv_moved_blocks_total{to="host"} > 0',
    'quire_kv_slots{kind="internal"} > 0',
    'quire_tenant_tokens_total{tenant="acme",kind="recomputed"} > 0',
    'quire_tenant_running_tokens{tenant="acme"} > 100',
    'quire_tenant_rejections_total{tenant="zeta"} >= 1',
    'quire_step_phase_seconds_sum{phase="forward"} > 0',
    "quire_kv_held_tokens / (quire_kv_held_slots > 0) > 0.5",
)
BEGINNING = "The library of a small town opens at nine and closes at six. Today somebody asks: "
QUESTIONS = ("where is the atlas", "who wrote the letters", "when does it open", "what do sailors write home")
# The second may have one request at a time, and asks for two.
KEYS = {"a" * 32: 'tenant = "acme"', "b" * 32: 'tenant = "zeta"\nmax_concurrent_requests = 1'}


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

    def scrapes(self, metric: str) -> dict[tuple[str, float], list[float]]:
        """The values of a metric by the job and the time of their scrape."""
        by_scrape: dict[tuple[str, float], list[float]] = {}
        for series in self.prometheus.query(f"{metric}[{math.ceil(self.end - self.start)}s]", time=self.end):
            for at, value in series["values"]:
                by_scrape.setdefault((series["metric"]["job"], at), []).append(float(value))
        return by_scrape

    def is_enough(self) -> bool:
        """Whether all that the load has to do was seen, and each service was scraped often enough."""
        succeeded = Counter(job for (job, _), (up,) in self.scrapes("up").items() if up)
        return (
            all(succeeded[f"quire-{name}"] >= LEAST_SCRAPES for name in ("kvmanager", "engine", "gateway"))
            and all(self.series(does) for does in DOES)
            and all((found := self.series(one.executable())) and all(found) for one in queries() if has_data(one))
        )


class Load:
    """Streams of two tenants that begin alike, some of which are late, left, refused, or come over HTTP."""

    def __init__(self, quire: RunningQuire) -> None:
        self._quire = quire
        self.acme, self.zeta = (Keyed(quire.addresses["gateway"], key) for key in KEYS)

    def run(self) -> None:
        """Run all of it once."""
        with ThreadPoolExecutor(STREAMS) as clients:
            streams = list(clients.map(self._stream, range(2 * STREAMS + 4)))
            for odd in (self._left, self._late, self._over_its_limit, self._over_http):
                odd()
        assert all(answer.finished.HasField("usage") for answer in streams)

    def close(self) -> None:
        self.acme.close()
        self.zeta.close()

    def _stream(self, number: int) -> Answer:
        request = prompt_request(f"{BEGINNING}{QUESTIONS[number % 4]}, number {number}?", 48 + 4 * (number % 4))
        return Answer.of(self.acme.gateway.Generate(request, timeout=CALL_SECONDS))

    def _left(self) -> None:
        call = self.acme.gateway.Generate(prompt_request("left", 500), timeout=CALL_SECONDS)
        next(call)
        call.cancel()

    def _late(self) -> None:
        with suppress(grpc.RpcError):
            list(self.acme.gateway.Generate(prompt_request("late", 500), timeout=0.2))

    def _over_its_limit(self) -> None:
        call = self.zeta.gateway.Generate(prompt_request(f"{BEGINNING}who reads?", 500), timeout=CALL_SECONDS)
        with suppress(grpc.RpcError):  # the first as well, while the one of the last time is not over
            next(call)
            list(self.zeta.gateway.Generate(prompt_request("one too many", 2), timeout=CALL_SECONDS))
        call.cancel()

    def _over_http(self) -> None:
        body = {"prompt": "The sky is", "max_tokens": 4}
        key = {"authorization": f"Bearer {next(iter(KEYS))}"}
        answer = httpx.post(f"{self._quire.http_url}/v1/completions", json=body, headers=key, timeout=CALL_SECONDS)
        assert answer.status_code == 200


def has_data(query: Query) -> bool:
    return not query.needs(*AFTER_FAULTS)


def watch(prometheus: RunningPrometheus, load: Load) -> Watched:
    """Run the load until all that it has to do was seen: on a slow machine that takes longer."""
    start, deadline = time.time(), time.monotonic() + LOAD_SECONDS
    while True:
        load.run()
        watched = Watched(prometheus, start, time.time())
        prometheus.wait_for_scrapes(watched.end)
        if time.monotonic() > deadline or watched.is_enough():
            return watched


@pytest.fixture(scope="module")
def watched(
    commands: Path,
    start: Callable[..., list[RunningQuire]],
    tiny_model: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Watched]:
    """A tiny model under 16 streams that begin alike, in a pool that is too small for all of them."""
    keys = write_keys(tmp_path_factory.mktemp("keys") / "keys.toml", KEYS)
    options = (
        *("--model", str(tiny_model("llama")), "--device-blocks", str(POOL_BLOCKS), "--api-keys", str(keys)),
        *("--host-blocks", str(HOST_BLOCKS), "--preemption", "recompute", "--http-listen", "127.0.0.1:0"),
        *("--kv-cache-metrics-sample", "1"),
    )
    (quire,) = start(options)
    targets = {name: url.split("/")[2] for name, url in quire.metrics_urls.items()}
    rules = {ALERTS.name: ALERTS.read_text()}
    folder = tmp_path_factory.mktemp("prometheus")
    with closing(RunningPrometheus(commands, folder, targets, rules)) as prometheus, closing(Load(quire)) as load:
        prometheus.wait_until("count(up == 1) == 3")
        prometheus.wait_until("quire_kv_pool_blocks")
        yield watch(prometheus, load)


@pytest.mark.parametrize("query", queries(), ids=lambda query: f"{query.panel}: {query.legend}")
def test_every_query_of_every_panel_returns_data_under_load(watched: Watched, query: Query) -> None:
    series = watched.series(query.executable())
    if not has_data(query):
        assert series == [], "it has data without a fault as well: take it off the list"
        return
    assert series
    assert all(series)
    assert all(value >= 0 for values in series for value in values)


@pytest.mark.parametrize("board", dashboards(), ids=lambda board: board.title)
def test_a_dashboards_variables_are_those_that_its_queries_ask_for(board: Dashboard) -> None:
    asked = {name for panel in board.panels for query in panel.queries for name in variables(query)}
    assert asked == {*board.variables} - {"datasource"}


@pytest.mark.parametrize("board", dashboards(), ids=lambda board: board.title)
def test_every_series_of_a_panel_has_a_unique_legend(watched: Watched, board: Dashboard) -> None:
    for panel in board.panels:
        names = [
            query.legend_of(series["metric"])
            for query in panel.queries
            for series in watched.prometheus.query_range(query.executable(), watched.start, watched.end)
        ]
        assert len(set(names)) == len(names), panel.title
        assert [name for name in names if "{{" in name] == [], panel.title


def variables(query: Query) -> set[str]:
    return set(re.findall(r"\$(\w+)", query.expression)) - {"__rate_interval"}


def test_the_states_of_the_blocks_sum_to_the_pool_at_every_scrape(watched: Watched) -> None:
    states, pool = (watched.scrapes(f'{name}{{tier="device"}}') for name in ("quire_kv_blocks", "quire_kv_pool_blocks"))
    assert len(states) >= LEAST_SCRAPES
    assert states.keys() == pool.keys()
    assert {tuple(counts) for counts in pool.values()} == {(POOL_BLOCKS,)}
    assert [at for at, counts in states.items() if len(counts) != 4 or sum(counts) != POOL_BLOCKS] == []


def test_the_panels_of_the_documents_picture_exist() -> None:
    assert set(SHOWN) <= {panel.title for board in dashboards() for panel in board.panels}


def test_no_scrape_failed(watched: Watched) -> None:
    """But where the machine stood still for as long as a scrape may take."""
    took = watched.scrapes("scrape_duration_seconds")
    scrapes = watched.scrapes("up")
    assert len(scrapes) >= 3 * LEAST_SCRAPES
    assert [one for one, (up,) in scrapes.items() if not up and took[one][0] < SCRAPE_SECONDS] == []


def test_the_panels_show_the_load(watched: Watched) -> None:
    """Queries that return data could all return zeros."""
    assert [does for does in DOES if not watched.series(does)] == []
    tokens_held = watched.series("quire_kv_held_tokens / (quire_kv_held_slots > 0)")
    assert max(map(max, tokens_held)) <= 1
