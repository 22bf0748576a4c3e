"""Queries of our dashboards and of vLLM's return data from a real Prometheus that scrapes a Quire under load."""

import math
import re
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest

from bench.serving.dashboard import SHOWN
from services.runtime.metrics.vllm_names import COUNTERPARTS
from tests.api_keys import Keyed, write_keys
from tests.deployment.dashboard import Dashboard, Query, dashboards, queries
from tests.deployment.prometheus import ALERTS, CONFIGURATION, RunningPrometheus
from tests.load import prompt_request
from tests.running_quire import CALL_SECONDS, Answer, RunningQuire, start_quire
from tests.scrape import Scrape

STREAMS = 16
POOL_BLOCKS = 40
HOST_BLOCKS = 16
MIN_SCRAPES = 8
# Interval and timeout of scrapes.
SCRAPE_SECONDS = 1
# The load ends after this time even if a query has not returned data.
MAX_LOAD_SECONDS = 120
# The effects of the load, as queries that return data once they have happened.
EFFECTS = (
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
# The second tenant sends two requests at a time, and its limit is one.
KEYS = {"a" * 32: 'tenant = "acme"', "b" * 32: 'tenant = "zeta"\nmax_concurrent_requests = 1'}

RULES = CONFIGURATION.with_name("vllm-rules.yml")
VLLM_QUERIES = [
    query
    for source in tomllib.loads((Path(__file__).parent / "vllm_queries.toml").read_text())["source"]
    for query in source["queries"]
]
MODEL = "tiny-llama"
VLLM_VARIABLES = {
    "$model_name": MODEL,
    "$Deployment_id": MODEL,
    **dict.fromkeys(("$job", "$instance", "$engine"), ".*"),
    "$__rate_interval": "4s",
    "$__range": "30s",
}


@dataclass(frozen=True)
class Watched:
    """A Prometheus that has scraped the load, and the times of its start and end in seconds since 1970."""

    prometheus: RunningPrometheus
    start: float
    end: float

    def series(self, expression: str) -> list[list[float]]:
        """Values of each series during the load, without NaN."""
        found = self.prometheus.query_range(expression, self.start, self.end)
        series = [[float(value) for _, value in one["values"]] for one in found]
        return [[value for value in values if not math.isnan(value)] for values in series]

    def has_number(self, vllm_query: str) -> bool:
        return any(math.isfinite(value) for values in self.series(executable(vllm_query)) for value in values)

    def scrapes(self, metric: str) -> dict[tuple[str, float], list[float]]:
        """Values of a metric by job and time of the scrape."""
        by_scrape: dict[tuple[str, float], list[float]] = {}
        for series in self.prometheus.query(f"{metric}[{math.ceil(self.end - self.start)}s]", time=self.end):
            for at, value in series["values"]:
                by_scrape.setdefault((series["metric"]["job"], at), []).append(float(value))
        return by_scrape


@dataclass(frozen=True)
class UnderLoad:
    """A Quire with `--metrics-compat vllm`, scraped by two Prometheuses.

    `compat` keeps vLLM's names from the scrapes; `rules` drops them and evaluates the recording rules.
    """

    quire: RunningQuire
    compat: Watched
    rules: Watched

    def is_complete(self) -> bool:
        """Return True if every query has data, and each service was scraped often enough."""
        succeeded = Counter(job for (job, _), (up,) in self.compat.scrapes("up").items() if up)
        ours = [query.executable() for query in queries()]
        return (
            all(succeeded[f"quire-{name}"] >= MIN_SCRAPES for name in ("kvmanager", "engine", "gateway"))
            and all(self.compat.series(effect) for effect in EFFECTS)
            and all((found := self.compat.series(query)) and all(found) for query in ours)
            and all(watched.has_number(query) for watched in (self.compat, self.rules) for query in VLLM_QUERIES)
        )


class Load:
    """Streams of two tenants with a shared prefix; some disconnect, time out, are rejected, invalid or use HTTP."""

    def __init__(self, quire: RunningQuire) -> None:
        self._quire = quire
        self.acme, self.zeta = (Keyed(quire.addresses["gateway"], key) for key in KEYS)

    def run(self) -> None:
        with ThreadPoolExecutor(STREAMS) as clients:
            streams = list(clients.map(self._stream, range(2 * STREAMS + 4)))
            others = self._disconnect, self._exceed_deadline, self._exceed_limit, self._use_http, self._break_a_bound
            for other in others:
                other()
        assert all(answer.finished.HasField("usage") for answer in streams)

    def close(self) -> None:
        self.acme.close()
        self.zeta.close()

    def _stream(self, number: int) -> Answer:
        request = prompt_request(f"{BEGINNING}{QUESTIONS[number % 4]}, number {number}?", 48 + 4 * (number % 4))
        return Answer.of(self.acme.gateway.Generate(request, timeout=CALL_SECONDS))

    def _disconnect(self) -> None:
        call = self.acme.gateway.Generate(prompt_request("disconnected", 500), timeout=CALL_SECONDS)
        next(call)
        call.cancel()

    def _exceed_deadline(self) -> None:
        with suppress(grpc.RpcError):
            list(self.acme.gateway.Generate(prompt_request("late", 500), timeout=0.2))

    def _exceed_limit(self) -> None:
        call = self.zeta.gateway.Generate(prompt_request(f"{BEGINNING}who reads?", 500), timeout=CALL_SECONDS)
        with suppress(grpc.RpcError):  # also of the first, while the previous run's request has not ended
            next(call)
            list(self.zeta.gateway.Generate(prompt_request("one too many", 2), timeout=CALL_SECONDS))
        call.cancel()

    def _break_a_bound(self) -> None:
        request = prompt_request("Once", 2)
        request.sampling.temperature = -1
        with pytest.raises(grpc.RpcError, match="temperature"):
            list(self.acme.gateway.Generate(request, timeout=CALL_SECONDS))

    def _use_http(self) -> None:
        self._post("/v1/completions", {"prompt": "The sky is", "max_tokens": 4})
        tools = [{"type": "function", "function": {"name": "now"}}]
        calling = {"messages": [{"role": "user", "content": "When?"}], "tools": tools, "tool_choice": "required"}
        for max_tokens in (80, 20):  # a whole call, and one that is cut
            self._post("/v1/chat/completions", {**calling, "parallel_tool_calls": False, "max_tokens": max_tokens})

    def _post(self, path: str, body: dict[str, object]) -> None:
        key = {"authorization": f"Bearer {next(iter(KEYS))}"}
        answer = httpx.post(f"{self._quire.http_url}{path}", json=body, headers=key, timeout=CALL_SECONDS)
        assert answer.status_code == 200


def executable(vllm_query: str) -> str:
    for variable, value in VLLM_VARIABLES.items():
        vllm_query = vllm_query.replace(variable, value)
    assert "$" not in vllm_query
    return vllm_query


@pytest.fixture(scope="module")
def under_load(
    commands: Path, tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[UnderLoad]:
    """A tiny model under 16 streams with a shared prefix, in a pool that is too small for all of them."""
    keys = write_keys(tmp_path_factory.mktemp("keys") / "keys.toml", KEYS)
    quire = start_quire(
        *("--model", str(tiny_model("llama")), "--device-blocks", str(POOL_BLOCKS), "--api-keys", str(keys)),
        *("--host-blocks", str(HOST_BLOCKS), "--preemption", "recompute", "--http-listen", "127.0.0.1:0"),
        *("--kv-events-listen", "127.0.0.1:0", "--kv-events-replay-listen", "127.0.0.1:0", "--smg"),
        *("--kv-cache-metrics-sample", "1", "--metrics-compat", "vllm", "--speculate-ngram", "8"),
    )
    targets = {name: url.split("/")[2] for name, url in quire.metrics_urls.items()}
    alerts = {ALERTS.name: ALERTS.read_text()}
    rules = {RULES.name: RULES.read_text().replace("interval: 5s", "interval: 1s")}
    with ExitStack() as running:
        running.callback(lambda: check_exit(quire))

        def scraped(rules: dict[str, str], dropped: str = "") -> RunningPrometheus:
            folder = tmp_path_factory.mktemp("prometheus")
            return running.enter_context(closing(RunningPrometheus(commands, folder, targets, rules, dropped=dropped)))

        both = scraped(alerts), scraped(rules, dropped="vllm:.*")
        load = running.enter_context(closing(Load(quire)))
        for prometheus in both:
            prometheus.wait_until("count(up == 1) == 3")
            prometheus.wait_until("quire_kv_pool_blocks")
        yield run_load(quire, load, both)


def check_exit(quire: RunningQuire) -> None:
    assert quire.close() == 0


def run_load(quire: RunningQuire, load: Load, both: tuple[RunningPrometheus, RunningPrometheus]) -> UnderLoad:
    """Run the load until all queries have data; slow machines need several rounds."""
    start, deadline = time.time(), time.monotonic() + MAX_LOAD_SECONDS
    while True:
        load.run()
        end = time.time()
        for prometheus in both:
            prometheus.wait_for_scrapes(end)
        under_load = UnderLoad(quire, *(Watched(prometheus, start, end) for prometheus in both))
        if time.monotonic() > deadline or under_load.is_complete():
            return under_load


@pytest.fixture(scope="module")
def watched(under_load: UnderLoad) -> Watched:
    return under_load.compat


@pytest.mark.parametrize("query", queries(), ids=lambda query: f"{query.panel}: {query.legend}")
def test_every_query_of_every_panel_returns_data_under_load(watched: Watched, query: Query) -> None:
    series = watched.series(query.executable())
    assert series
    assert all(series)
    assert all(value >= 0 for values in series for value in values)


@pytest.mark.parametrize("board", dashboards(), ids=lambda board: board.title)
def test_a_dashboards_variables_are_those_of_its_queries(board: Dashboard) -> None:
    used = {name for panel in board.panels for query in panel.queries for name in variables(query)}
    assert used == {*board.variables} - {"datasource"}


@pytest.mark.parametrize("board", dashboards(), ids=lambda board: board.title)
def test_a_dashboard_keeps_releases_apart(board: Dashboard) -> None:
    assert board.variables[1:3] == ("namespace", "release")
    for query in (query for panel in board.panels for query in panel.queries):
        assert query.legend.startswith("{{namespace}} {{release}} ")
        for labels in re.findall(r"\b(?:by|on) \(([^)]*)\)", query.expression):
            assert labels.split(", ")[:2] == ["namespace", "release"], query.expression
        selectors = re.findall(r"\b(?:up|ALERTS|process_\w+|quire_\w+|quire:\w+:\w+)\b(?!\.)(\S*)", query.expression)
        assert selectors
        assert [one for one in selectors if '{namespace=~"$namespace",release=~"$release"' not in one] == []


def variables(query: Query) -> set[str]:
    return set(re.findall(r"\$(\w+)", query.expression)) - {"__rate_interval"}


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


def test_the_states_of_the_blocks_sum_to_the_pool_at_every_scrape(watched: Watched) -> None:
    states, pool = (watched.scrapes(f'{name}{{tier="device"}}') for name in ("quire_kv_blocks", "quire_kv_pool_blocks"))
    assert len(states) >= MIN_SCRAPES
    assert states.keys() == pool.keys()
    assert {tuple(counts) for counts in pool.values()} == {(POOL_BLOCKS,)}
    assert [at for at, counts in states.items() if len(counts) != 4 or sum(counts) != POOL_BLOCKS] == []


def test_the_panels_of_the_documents_picture_exist() -> None:
    assert set(SHOWN) <= {panel.title for board in dashboards() for panel in board.panels}


def test_no_scrape_fails_before_its_timeout(watched: Watched) -> None:
    took = watched.scrapes("scrape_duration_seconds")
    scrapes = watched.scrapes("up")
    assert len(scrapes) >= 3 * MIN_SCRAPES
    assert [one for one, (up,) in scrapes.items() if not up and took[one][0] < SCRAPE_SECONDS] == []


def test_the_panels_show_the_load(watched: Watched) -> None:
    """Queries that return data could all return zeros."""
    assert [effect for effect in EFFECTS if not watched.series(effect)] == []
    tokens_held = watched.series("quire_kv_held_tokens / (quire_kv_held_slots > 0)")
    assert max(map(max, tokens_held)) <= 1


@pytest.mark.parametrize("source", ["compat", "rules"])
@pytest.mark.parametrize("query", VLLM_QUERIES)
def test_a_query_for_vllm_returns_a_number(under_load: UnderLoad, query: str, source: str) -> None:
    assert getattr(under_load, source).has_number(query)


@pytest.mark.parametrize("source", ["compat", "rules"])
def test_vllm_names_have_the_values_of_quires_metrics(under_load: UnderLoad, source: str) -> None:
    """Waits until they are equal, because rules are evaluated after the scrape."""
    pairs = [(one.ours, theirs, one.suffixes[0]) for one in COUNTERPARTS if not one.words for theirs in one.theirs]
    for ours, theirs, suffix in pairs:
        getattr(under_load, source).prometheus.wait_until(f"sum({theirs}{suffix}) == sum({ours}{suffix})")


def test_each_counterpart_is_exported_under_its_names_and_with_the_type_of_the_table(under_load: UnderLoad) -> None:
    types = {
        name: family.type
        for url in under_load.quire.metrics_urls.values()
        for name, family in Scrape.of(url).families.items()
    }
    suffix, kind = {"info": "_info"}, {"info": "gauge"}
    expected = {
        name + suffix.get(one.kind, ""): kind.get(one.kind, one.kind) for one in COUNTERPARTS for name in one.theirs
    }
    assert {name: shown for name, shown in types.items() if name.startswith("vllm:")} == expected
    for one in COUNTERPARTS:
        assert types[one.ours + suffix.get(one.kind, "")] == kind.get(one.kind, one.kind), one.name
