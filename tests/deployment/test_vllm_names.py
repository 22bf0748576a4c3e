"""vLLM's dashboards and the usual autoscalers work unchanged: by --metrics-compat, and by the recording rules."""

import math
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from services.runtime.metrics.vllm_names import COUNTERPARTS
from tests.deployment.prometheus import CONFIGURATION, RunningPrometheus
from tests.load import prompt_request, run_streams
from tests.running_quire import RunningQuire
from tests.scrape import Scrape

HERE = Path(__file__).parent
RULES = CONFIGURATION.with_name("vllm-rules.yml")
SOURCES = tomllib.loads((HERE / "vllm_queries.toml").read_text())["source"]
QUERIES = [query for source in SOURCES for query in source["queries"]]
MODEL = "tiny-llama"
VARIABLES = {
    "$model_name": MODEL,
    "$Deployment_id": MODEL,
    **dict.fromkeys(("$job", "$instance", "$engine"), ".*"),
    "$__rate_interval": "4s",
    "$__range": "30s",
}
STREAMS = 8
# After this the load ends even if a query has not returned a number.
LOAD_SECONDS = 120
WAYS = ("compat", "rules")


@dataclass(frozen=True)
class Watched:
    """A Prometheus after it watched the load, and when that was, in seconds since 1970."""

    quire: RunningQuire
    prometheus: RunningPrometheus
    start: float
    end: float

    def numbers(self, query: str) -> list[float]:
        found = self.prometheus.query_range(query, self.start, self.end)
        numbers = [float(value) for series in found for _, value in series["values"]]
        return [number for number in numbers if math.isfinite(number)]

    def is_enough(self) -> bool:
        """Whether every query has returned a number."""
        return all(self.numbers(executable(query)) for query in QUERIES)


def executable(query: str) -> str:
    for variable, value in VARIABLES.items():
        query = query.replace(variable, value)
    assert "$" not in query
    return query


@pytest.fixture(scope="module")
def both(
    commands: Path,
    start: Callable[..., list[RunningQuire]],
    tiny_model: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, Watched]]:
    """Two Quires under load: one shows vLLM's names itself, the other one's Prometheus makes them."""
    options = ("--model", str(tiny_model("llama")), "--device-blocks", "40")
    quires = dict(zip(WAYS, start((*options, "--metrics-compat", "vllm"), options), strict=True))
    rules = {"compat": {}, "rules": {RULES.name: RULES.read_text().replace("interval: 5s", "interval: 1s")}}
    with ExitStack() as watching, ThreadPoolExecutor(len(WAYS)) as loads:

        def watch(way: str) -> Watched:
            folder, targets = tmp_path_factory.mktemp(way), _targets(quires[way])
            prometheus = watching.enter_context(closing(RunningPrometheus(commands, folder, targets, rules[way])))
            prometheus.wait_until("count(up == 1) == 3")
            return _watched(quires[way], prometheus)

        yield dict(zip(WAYS, loads.map(watch, WAYS), strict=True))


def _targets(quire: RunningQuire) -> dict[str, str]:
    return {name: url.split("/")[2] for name, url in quire.metrics_urls.items()}


def _watched(quire: RunningQuire, prometheus: RunningPrometheus) -> Watched:
    """Run a load until every query has returned a number: on a slow machine that takes longer."""
    requests = [
        prompt_request(f"A beginning that all of them share, so that some is cached. Number {number}?", 40)
        for number in range(2 * STREAMS)
    ]
    start, deadline = time.time(), time.monotonic() + LOAD_SECONDS
    while True:
        run_streams(quire, requests, STREAMS)
        watched = Watched(quire, prometheus, start, time.time())
        prometheus.wait_for_scrapes(watched.end)
        if time.monotonic() > deadline or watched.is_enough():
            return watched


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("query", QUERIES)
def test_a_query_for_vllm_returns_a_number(both: dict[str, Watched], query: str, way: str) -> None:
    assert both[way].numbers(executable(query))


@pytest.mark.parametrize("way", WAYS)
def test_vllms_names_have_the_values_of_ours(both: dict[str, Watched], way: str) -> None:
    """Once nothing changes any more: rules are evaluated a moment after the scrape."""
    pairs = [(one.ours, theirs, one.suffixes[0]) for one in COUNTERPARTS if not one.words for theirs in one.theirs]
    for ours, theirs, suffix in pairs:
        both[way].prometheus.wait_until(f"sum({theirs}{suffix}) == sum({ours}{suffix})")


def test_each_counterpart_is_exported_under_its_names_only_with_the_flag(
    both: dict[str, Watched],
) -> None:
    shown = [set(Scrape.of(url).families) for url in both["compat"].quire.metrics_urls.values()]
    names = {name for families in shown for name in families if name.startswith("vllm:")}
    ends = {"info": "_info"}
    assert names == {name + ends.get(one.kind, "") for one in COUNTERPARTS for name in one.theirs}
    without = [Scrape.of(url).families for url in both["rules"].quire.metrics_urls.values()]
    assert not any(name.startswith("vllm:") for families in without for name in families)


def test_the_table_has_the_type_of_each_metric(both: dict[str, Watched]) -> None:
    shown = {
        name: family.type
        for url in both["rules"].quire.metrics_urls.values()
        for name, family in Scrape.of(url).families.items()
    }
    kinds = {"info": "gauge"}
    for one in COUNTERPARTS:
        assert shown[one.ours + ("_info" if one.kind == "info" else "")] == kinds.get(one.kind, one.kind), one.name


def test_the_rules_are_those_of_the_table() -> None:
    script = RULES.with_name("vllm_rules.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert done.stdout == RULES.read_text(), "run make rules"


def test_promtool_accepts_the_rules_and_they_pass_its_cases(commands: Path, tmp_path: Path) -> None:
    cases = tmp_path / "cases.yml"
    cases.write_text((HERE / "vllm-rules-test.yml").read_text().replace("RULES", str(RULES)))
    for arguments in (("check", "rules", RULES), ("test", "rules", cases)):
        done = subprocess.run([commands / "promtool", *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
