"""Objects for the Prometheus operator and Grafana."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from deploy.prometheus.rules import alerts, with_matchers
from deploy.prometheus.thresholds import PRESETS, Preset, preset
from deploy.prometheus.vllm_rules import vllm_rules
from tests.deployment.helm.chart import CHART, ROOT, TYPES, Object, nested, of_kind, only, refusal, render, render_ci
from tests.deployment.test_alerts import ONE_RELEASE
from tests.deployment.two_releases import with_another_release

DASHBOARDS = sorted((CHART / "dashboards").glob("*.json"))
RULES = sorted((CHART / "rules").glob("*.yml"))
OF_BLUE = 'namespace="llm",release="blue"'


@pytest.mark.parametrize("values", [{}, {"gateway": {"service": {"type": "LoadBalancer"}, "insecure": True}}], ids=str)
def test_one_service_monitor_selects_the_metrics_of_each_service_once(values: Object) -> None:
    values = {**values, "metrics": {"serviceMonitor": {"enabled": True}}}
    spec = only(render(values), "ServiceMonitor")["spec"]
    (endpoint,) = spec["endpoints"]
    assert (endpoint["port"], endpoint["interval"], endpoint["scrapeTimeout"]) == ("metrics", "30s", "10s")
    selected = [
        item["spec"]["selector"]["app.kubernetes.io/component"]
        for objects in (render(values), render(release="green"))
        for item in of_kind(objects, "Service")
        if spec["selector"]["matchLabels"].items() <= item["metadata"]["labels"].items()
        and "metrics" in {port["name"] for port in item["spec"]["ports"]}
    ]
    assert sorted(selected) == sorted(TYPES)


def test_alerts_select_the_jobs_for_any_release_name() -> None:
    objects = render({"fullnameOverride": "llm", "metrics": {"serviceMonitor": {"enabled": True}}})
    label = only(objects, "ServiceMonitor")["spec"]["jobLabel"]
    jobs = {item["metadata"]["labels"][label] for item in of_kind(objects, "Service")}
    scraped = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    assert {f"quire-{name}" for name in TYPES} == jobs
    for path in RULES:
        for pattern in re.findall(r'job=~"([^"]*)"', path.read_text()):
            assert any(re.fullmatch(pattern, job) for job in jobs), pattern
            assert any(re.fullmatch(pattern, one["job_name"]) for one in scraped), pattern


def test_metrics_are_labelled_with_their_release() -> None:
    (endpoint,) = only(render_ci("metrics"), "ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["relabelings"] == [{"targetLabel": "release", "replacement": "blue"}]


def test_the_dashboards_are_in_a_config_map_that_grafana_finds() -> None:
    config_map = only(render_ci("metrics"), "ConfigMap")
    assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert DASHBOARDS
    assert {name: json.loads(text) for name, text in config_map["data"].items()} == {
        f"quire-{path.name}": json.loads(path.read_text()) for path in DASHBOARDS
    }
    assert len(json.dumps(config_map)) < 1024 * 1024, "Kubernetes refuses larger objects"


def test_two_releases_have_one_copy_of_the_dashboards() -> None:
    """Helm refuses the object of another release, and Grafana's sidecar keeps one file for one name."""
    own, other = (
        only(render({"metrics": {"dashboard": {"enabled": True}}}, release=name), "ConfigMap")
        for name in ("blue", "green")
    )
    assert own["metadata"]["name"] == other["metadata"]["name"]
    assert own["data"] == other["data"]


@pytest.mark.parametrize("name", PRESETS)
def test_the_rules_are_those_of_plain_prometheus_for_this_release(name: Preset) -> None:
    rule = only(render({"metrics": {"prometheusRule": {"enabled": True, "preset": name}}}), "PrometheusRule")
    plain = [with_matchers(text, OF_BLUE) for text in (alerts(preset(name)), vllm_rules())]
    assert rule["spec"]["groups"] == [group for text in plain for group in yaml.safe_load(text)["groups"]]


def test_every_selector_of_the_rules_matches_its_release_alone() -> None:
    for rule in rules_of("blue"):
        expression = re.sub(r'"[^"]*"', '""', rule["expr"])
        selectors = re.findall(r"\b(?:up|process_\w+|quire_\w+|quire:\w+:\w+)\b\S*", expression)
        assert selectors
        assert [one for one in selectors if '{namespace="",release=""' not in one] == []


def test_thresholds_of_the_values_replace_those_of_the_preset() -> None:
    own = {"firstTokenSeconds": 5, "heldShare": 0.75, "errorBudget": 0.00001}
    expected = with_matchers(alerts(preset("gpu") | own), OF_BLUE)
    rules = {"enabled": True, "preset": "gpu", "thresholds": own}
    found = only(render({"metrics": {"prometheusRule": rules}}), "PrometheusRule")["spec"]["groups"]
    assert found[:-1] == yaml.safe_load(expected)["groups"]
    own = {"firstTokenSeconds": 2.5, "tokenSeconds": 0.15, "heldShare": 0.75}
    options = [f"--set=metrics.prometheusRule.thresholds.{name}={value}" for name, value in own.items()]
    found = only(render(nested("metrics.prometheusRule.enabled", True), *options), "PrometheusRule")["spec"]["groups"]
    assert found[:-1] == yaml.safe_load(with_matchers(alerts(preset("cpu") | own), OF_BLUE))["groups"]


@pytest.mark.parametrize(
    ("thresholds", "reason"),
    [
        ({"firstTokenSeconds": 3}, "value must be one of"),
        ({"heldShare": 2}, "maximum"),
        ({"heldShare": "1.5"}, "heldShare is 1.5, but it must be at most 1"),
        ({"heldShare": "0.0"}, "heldShare is 0.0, but it must be more than 0"),
        ({"seconds": 1}, "additional properties 'seconds' not allowed"),
    ],
    ids=str,
)
def test_thresholds_that_cannot_work_are_refused(thresholds: Object, reason: str) -> None:
    assert reason in refusal({"metrics": {"prometheusRule": {"thresholds": thresholds}}})


def test_services_with_vllms_names_have_no_rules_for_them() -> None:
    values = {"metrics": {"prometheusRule": {"enabled": True}}, "engine": {"settings": {"metrics_compat": "vllm"}}}
    groups = only(render(values), "PrometheusRule")["spec"]["groups"]
    assert [group["name"] for group in groups if "quire" not in group["name"]] == []


@pytest.mark.parametrize("cases", ONE_RELEASE, ids=lambda path: path.stem)
def test_rules_of_two_releases_fire_once_for_the_one_that_fails(commands: Path, cases: Path, tmp_path: Path) -> None:
    files = []
    for release in ("prod", "staging"):
        files.append(tmp_path / f"{release}.yml")
        files[-1].write_text(json.dumps({"groups": groups_of(release)}))
    made = tmp_path / "cases.yml"
    made.write_text(yaml.safe_dump(with_another_release(cases, files)))
    for arguments in (("check", "rules", *files), ("test", "rules", made)):
        done = subprocess.run([commands / "promtool", *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_release_whose_targets_are_gone_for_hours_pages_until_it_is_uninstalled(
    commands: Path, tmp_path: Path
) -> None:
    rules, cases = tmp_path / "rules.json", tmp_path / "cases.yml"
    rules.write_text(json.dumps({"groups": groups_of("prod")}))
    up = [f'up{{namespace="llm",release="staging",job="quire-{name}"}}' for name in TYPES]
    missing = [
        {
            "exp_labels": {"severity": "page", "namespace": "llm", "release": "prod", "service": name},
            "exp_annotations": {
                "summary": f"Prometheus has no target for the {name} (release prod, namespace llm)",
                "description": "The other alerts of this service cannot fire.",
                "runbook_url": "docs/alerts.md#quiretargetmissing",
            },
        }
        for name in TYPES
    ]
    test = {
        "interval": "1m",
        "input_series": [{"series": one, "values": "1x300"} for one in up],
        "alert_rule_test": [{"alertname": "QuireTargetMissing", "eval_time": "4h", "exp_alerts": missing}],
    }
    cases.write_text(yaml.safe_dump({"rule_files": [str(rules)], "tests": [test]}))
    done = subprocess.run([commands / "promtool", "test", "rules", cases], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_runbooks_are_at_the_given_address() -> None:
    rule = {"enabled": True, "runbookUrl": "https://wiki.example.org/alerts.html"}
    spec = only(render({"metrics": {"prometheusRule": rule}}), "PrometheusRule")["spec"]
    found = [one for group in spec["groups"] for one in group["rules"] if "alert" in one]
    assert found
    for one in found:
        assert one["annotations"]["runbook_url"] == f"https://wiki.example.org/alerts.html#{one['alert'].lower()}"
    for wrong in ("https://wiki.example.org/alerts#top", "wiki.example.org", "https://x/{{ 1 }}", ""):
        assert "'/metrics/prometheusRule/runbookUrl'" in refusal({"metrics": {"prometheusRule": {"runbookUrl": wrong}}})


def rules_of(release: str) -> list[Object]:
    return [rule for group in groups_of(release) for rule in group["rules"]]


def groups_of(release: str) -> list[Object]:
    values = {"metrics": {"prometheusRule": {"enabled": True}}}
    groups: list[Object] = only(render(values, release=release), "PrometheusRule")["spec"]["groups"]
    assert len({group["name"] for group in groups}) == len(groups)
    return groups
