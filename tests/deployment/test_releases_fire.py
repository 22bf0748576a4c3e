"""Pages of one release fire while another is up, on the services of two releases and one real Prometheus.

`make alerts-check` runs this, and writes its part of docs/alerts-fired.md. All durations of the rules are divided by
60: a minute becomes a second.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.deployment.alert_stack import AlertStack, clients
from tests.deployment.alerts_report import DIVISOR, write_releases
from tests.deployment.dashboard import queries
from tests.deployment.prometheus import ALERTS, NAMESPACE, RunningPrometheus
from tests.deployment.scaled_rules import scaled
from tests.load import prompt_request
from tests.running_quire import CALL_SECONDS, Answer

MAX_SECONDS = 100
SERVICES = ("gateway", "engine", "kvmanager")
# No page for the engines, which the KV manager takes along.
DOWN = ("QuireNoGateway", "QuireNoKVManager", "QuireServiceDown")

pytestmark = pytest.mark.timeout(600)


class Releases(NamedTuple):
    """Two installations, and the Prometheus that scrapes both."""

    prod: AlertStack
    staging: AlertStack
    prometheus: RunningPrometheus


@pytest.fixture
def releases(
    commands: Path, tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Releases]:
    model = str(tiny_model("llama"))
    rules = {ALERTS.name: scaled(ALERTS.read_text(), DIVISOR)}
    with ExitStack() as running:
        prod, staging = (
            running.enter_context(closing(AlertStack(tmp_path_factory.mktemp(name), model)))
            for name in ("prod", "staging")
        )
        folder = tmp_path_factory.mktemp("prometheus")
        one = RunningPrometheus(commands, folder, dict.fromkeys(SERVICES, ""), rules, "500ms")
        yield Releases(prod, staging, running.enter_context(closing(one)))


def test_pages_of_a_release_that_is_down_fire_while_another_is_up(releases: Releases) -> None:
    prod, staging, prometheus = releases
    prometheus.watch({"prod": prod.targets, "staging": staging.targets})
    prometheus.wait_until("count(up == 1) == 6")
    prometheus.wait_until("count(quire_kv_pool_connected == 1) == 2")
    rows = []
    with clients(staging, 1, 4):
        with clients(prod, 1, 4):
            check_dashboards(prometheus)
        begun = time.monotonic()
        for name in SERVICES:
            prod.kill(name)
        fired = wait_for(prometheus, begun, {name: 1 if name != "QuireServiceDown" else 3 for name in DOWN})
        rows += [row(alert, "all services of prod are killed", seconds) for alert, seconds in fired]
        begun = time.monotonic()
        prometheus.watch({"staging": staging.targets})
        fired = wait_for(prometheus, begun, {"QuireTargetMissing": 3, "QuireNoGateway": 1, "QuireNoKVManager": 1})
        rows += [
            row(alert, "all targets of prod are removed", seconds)
            for alert, seconds in fired
            if alert["labels"]["alertname"] == "QuireTargetMissing"
        ]
        answer = Answer.of(staging.acme.gateway.Generate(prompt_request("still up", 4), timeout=CALL_SECONDS))
    assert answer.finished.usage.generated_tokens == 4
    provoked = (*DOWN, "QuireTargetMissing")
    assert [one for one in of_release(prometheus, "staging") if one["labels"]["alertname"] in provoked] == []
    write_releases(rows)


def check_dashboards(prometheus: RunningPrometheus) -> None:
    """Check that panels show both releases under different names, and one of them if it is chosen."""
    both = {"prod", "staging"}
    prometheus.wait_until("count(quire:slow_tokens:ratio_rate5m) == 2")
    prometheus.wait_until("count(rate(quire_step_seconds_count[5s]) > 0) == 2")
    shown = 0
    for query in queries():
        series = [one["metric"] for one in prometheus.query(query.executable())]
        names = [query.legend_of(labels) for labels in series]
        assert len(set(names)) == len(names), query
        if releases := {labels["release"] for labels in series if "release" in labels}:
            assert releases <= both
            shown += releases == both
        chosen = prometheus.query(replace(query, expression=query.expression.replace("$release", "prod")).executable())
        assert {one["metric"].get("release", "prod") for one in chosen} <= {"prod"}
    assert shown > len(queries()) / 2


def wait_for(prometheus: RunningPrometheus, begun: float, counts: dict[str, int]) -> list[tuple[dict[str, Any], float]]:
    """Wait until so many of these alerts fire, and return them with the seconds since `begun`."""
    deadline = time.monotonic() + MAX_SECONDS
    seen: dict[str, tuple[dict[str, Any], float]] = {}
    while True:
        firing = of_release(prometheus, "prod")
        for one in firing:
            seen.setdefault(str(sorted(one["labels"].items())), (one, time.monotonic() - begun))
        names = [one["labels"]["alertname"] for one in firing]
        if all(names.count(name) == count for name, count in counts.items()):
            return [(one, seconds) for one, seconds in seen.values() if one["labels"]["alertname"] in counts]
        assert time.monotonic() < deadline, f"not all of {counts} fire: {sorted(names)}"
        time.sleep(0.25)  # Prometheus has no notifications to wait for


def of_release(prometheus: RunningPrometheus, release: str) -> list[dict[str, Any]]:
    """Return the firing alerts of a release; each alert belongs to one of the two."""
    firing = [one for one in prometheus.alerts() if one["state"] == "firing"]
    assert {one["labels"].get("namespace") for one in firing} <= {NAMESPACE}
    assert {one["labels"].get("release") for one in firing} <= {"prod", "staging"}
    return [one for one in firing if one["labels"]["release"] == release]


def row(alert: dict[str, Any], provocation: str, seconds: float) -> str:
    labels = alert["labels"]
    cells = (labels["alertname"], labels["severity"], labels["namespace"], labels["release"], provocation)
    return f"| {' | '.join(cells)} | {seconds:.0f} s | {without_addresses(alert)} |"


def without_addresses(alert: dict[str, Any]) -> str:
    summary: str = alert["annotations"]["summary"]
    return summary.replace(f" at {alert['labels'].get('instance')}", "")
