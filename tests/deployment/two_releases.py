"""Cases of promtool with two releases in one Prometheus, made of the cases of one.

In each, one release has the failure of a case in which an alert fires, and the other the series of a case in which it
does not. Engines and models have the same names in both.
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.deployment.prometheus import NAMESPACE

Case = dict[str, Any]


def with_another_release(cases: Path, rules: "list[Path]") -> Case:
    """Return promtool's file of cases for these rules; `prod` fails, and `staging` does not."""
    read: Case = yaml.safe_load(cases.read_text())
    return {**read, "rule_files": [str(path) for path in rules], "tests": list(_tests(read["tests"]))}


def of_release(test: Case, release: str) -> Case:
    """Return the test with all series and expected alerts in a release."""
    labelled = copy.deepcopy(test)
    for series in labelled["input_series"]:
        series["series"] = _with_labels(series["series"], release)
    for check in labelled["alert_rule_test"]:
        for expected in check["exp_alerts"]:
            expected["exp_labels"] |= {"namespace": NAMESPACE, "release": release}
            expected["exp_annotations"]["summary"] += f" (release {release}, namespace {NAMESPACE})"
    return labelled


def _tests(tests: list[Case]) -> Iterator[Case]:
    silent = {alert: test for test in reversed(tests) for alert, fires in _alerts(test) if not fires}
    for test in tests:
        for alert, fires in _alerts(test):
            if fires:
                yield _both(of_release(test, "prod"), of_release(silent[alert], "staging"), alert)


def _both(failing: Case, healthy: Case, alert: str) -> Case:
    """Return a test with the series of both, the shorter one later, so that both are at their evaluation times."""
    checks = [_check(test, alert) for test in (failing, healthy)]
    minutes = [_minutes(check["eval_time"]) for check in checks]
    series = [
        {**one, "values": f"_x{max(minutes) - own} {one['values']}" if own < max(minutes) else one["values"]}
        for test, own in zip((failing, healthy), minutes, strict=True)
        for one in test["input_series"]
    ]
    return {**failing, "input_series": series, "alert_rule_test": [{**checks[0], "eval_time": f"{max(minutes)}m"}]}


def _check(test: Case, alert: str) -> Case:
    (check,) = [one for one in test["alert_rule_test"] if one["alertname"] == alert]
    return check  # type: ignore[no-any-return]


def _minutes(time: str) -> int:
    return int(time[:-1]) * {"m": 1, "h": 60}[time[-1]]


def _alerts(test: Case) -> Iterator[tuple[str, bool]]:
    for check in test["alert_rule_test"]:
        yield check["alertname"], bool(check["exp_alerts"])


def _with_labels(series: str, release: str) -> str:
    name, _, others = series.partition("{")
    return f'{name}{{namespace="{NAMESPACE}",release="{release}"' + (f",{others}" if others else "}")
