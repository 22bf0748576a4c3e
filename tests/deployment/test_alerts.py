"""Alerts pass promtool's cases, query existing metrics, and have runbooks."""

import functools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.prometheus.rules import alerts as rendered
from deploy.prometheus.rules import files
from deploy.prometheus.thresholds import THRESHOLDS, UnknownThreshold, changed, preset
from tests.deployment.dashboard import dashboards
from tests.deployment.prometheus import ALERTS, CONFIGURATION, ROOT
from tests.deployment.two_releases import with_another_release
from tests.services.test_metrics import OF_TLS, SHOWN

CASES = sorted((Path(__file__).parent / "alerts").glob("*.yml"))
ONE_RELEASE = [path for path in CASES if path.stem in ("blocks", "objectives", "requests", "services")]
RUNBOOKS = ROOT / "docs" / "alerts.md"
PAGE = "https://wiki.example.org/alerts.html"
PROMETHEUS_OWN = {"up", "process_start_time_seconds"}

Rule = dict[str, Any]


@functools.cache
def rules() -> list[Rule]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alerts() -> dict[str, Rule]:
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def name_of(rule: Rule) -> str:
    return str(rule.get("alert") or rule.get("record"))


@pytest.fixture(scope="module")
def promtool(commands: Path) -> Path:
    return commands / "promtool"


def run(*command: "str | Path") -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool_accepts_the_rules_and_the_configuration_that_loads_them(promtool: Path) -> None:
    run(promtool, "check", "rules", *(path for path in files() if path.name.startswith("alerts")))
    assert f"{len(rules())} rules found" in run(promtool, "check", "config", CONFIGURATION)


@pytest.mark.parametrize("cases", CASES, ids=lambda path: path.stem)
def test_every_alert_fires_in_its_case_and_not_in_the_near_miss(promtool: Path, cases: Path) -> None:
    run(promtool, "test", "rules", cases)


@pytest.mark.parametrize("cases", ONE_RELEASE, ids=lambda path: path.stem)
def test_every_alert_fires_for_its_release_alone(promtool: Path, cases: Path, tmp_path: Path) -> None:
    made = tmp_path / cases.name
    made.write_text(yaml.safe_dump(with_another_release(cases, [ALERTS])))
    run(promtool, "test", "rules", made)


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    expected = {
        (check["alertname"], bool(check["exp_alerts"]))
        for file in CASES
        for test in yaml.safe_load(file.read_text())["tests"]
        for check in test["alert_rule_test"]
    }
    assert expected == {(alert, fires) for alert in alerts() for fires in (True, False)}


@pytest.mark.parametrize("rule", rules(), ids=name_of)
def test_rules_query_existing_metrics_and_labels(rule: Rule) -> None:
    recorded = {str(other["record"]) for other in rules() if "record" in other}
    shown: dict[str, set[str]] = {name: {"usage"} for name in OF_TLS}
    for names in SHOWN.values():
        shown |= {name: {*labels, "model_name", "engine", "le"} for name, labels in names.items()}
    expression = rule["expr"]
    found = set(re.findall(r"quire:\w+:\w+|\bquire_\w+|\bup\b|\bprocess_\w+", expression))
    assert found
    for name in found - recorded - PROMETHEUS_OWN:
        family = re.sub(r"_(total|bucket|count)$", "", name)
        assert family in shown, f"{name} is exported by no service"
        for selector in re.findall(name + r"\{([^}]*)\}", expression):
            assert set(re.findall(r"(\w+)\s*(?:=|!)", selector)) <= shown[family], name


@pytest.mark.parametrize("rule", rules(), ids=name_of)
def test_every_aggregation_and_match_keeps_releases_apart(rule: Rule) -> None:
    expression = rule["expr"]
    for labels in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression):
        assert labels.split(", ")[:2] == ["namespace", "release"]
    assert re.findall(r"\b(?:sum|count|min|max|avg)(?! by)\s*\(|\bwithout\b|\bignoring\b", expression) == []


@pytest.mark.parametrize("alert", alerts())
def test_every_alert_has_a_severity_a_summary_and_a_runbook(alert: str) -> None:
    rule = alerts()[alert]
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
    assert rule["annotations"]["runbook_url"] == f"docs/alerts.md#{alert.lower()}"


def test_the_documentation_has_a_runbook_for_each_alert() -> None:
    text = RUNBOOKS.read_text()
    sections = dict(re.findall(r"^### (Quire\w+)\n\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL))
    assert list(sections) == list(alerts())
    for alert, section in sections.items():
        severity = alerts()[alert]["labels"]["severity"]
        assert section.startswith(f"*{severity.capitalize()}.*"), alert
        assert "\n* **Check** " in section, alert
        assert "\n* **Do**" in section, alert


def test_the_documentation_names_panels_that_exist() -> None:
    titles = {panel.title for board in dashboards() for panel in board.panels}
    section = " ".join(RUNBOOKS.read_text().split())
    named = re.findall(r"panels? ((?:\"[^\"]+\"(?:, | and )?)+)", section)
    found = {title for names in named for title in re.findall(r"\"([^\"]+)\"", names)}
    assert found
    assert found <= titles


def test_the_documentation_has_the_dashboard_of_each_panel_that_it_names() -> None:
    text = RUNBOOKS.read_text()
    rows = {
        name: set(re.findall('"([^"]+)"', row)) for name, row in re.findall(r"^\| (\w[\w ]+) \| (\".+) \|$", text, re.M)
    }
    runbooks = set(re.findall('"([^"]+)"', text.partition("\n## Objectives at risk")[2]))
    titles = {board.title: {panel.title for panel in board.panels} & runbooks for board in dashboards()}
    assert rows == titles


def test_compose_mounts_the_file_of_alerts_that_its_variable_names() -> None:
    (default,) = re.findall(r"^QUIRE_ALERTS=(.*)$", (ROOT / ".env").read_text(), re.MULTILINE)
    assert default == ALERTS.name
    volumes = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["prometheus"]["volumes"]
    assert f"./deploy/prometheus/${{QUIRE_ALERTS-{default}}}:/etc/prometheus/{ALERTS.name}:ro" in volumes


def test_each_threshold_changes_the_rules() -> None:
    values = preset("cpu")
    assert rendered(values) == ALERTS.read_text().split("\n", 1)[1]
    for one in THRESHOLDS:
        other = one.choices[0] if one.choices else values[one.name] / 2
        assert rendered(changed(values, [(one.name, other)])) != rendered(values), one.name


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("seconds", 1, "there is no threshold seconds"),
        ("firstTokenSeconds", 3, "must be one of 0.001, .*, 1, 2.5, 5"),
        ("heldShare", 1.5, "must be more than 0 and at most 1"),
        ("kvStepSeconds", 0, "must be more than 0$"),
    ],
)
def test_a_threshold_that_cannot_work_is_refused(name: str, value: float, reason: str) -> None:
    with pytest.raises(UnknownThreshold, match=reason):
        changed(preset("gpu"), [(name, value)])


def test_rules_with_own_thresholds_are_written_for_plain_prometheus() -> None:
    command = (sys.executable, "-m", "deploy.prometheus", "--preset", "gpu", "--set", "firstTokenSeconds=5")
    written = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert written == rendered(preset("gpu") | {"firstTokenSeconds": 5})
    linked = subprocess.run(
        [*command, "--runbook-url", PAGE], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert linked == written.replace("docs/alerts.md#", f"{PAGE}#") != written
    refused = subprocess.run([*command[:-1], "x=1"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "there is no threshold x" in refused.stderr
