"""Objects for the Prometheus operator and Grafana."""

import json
import re

import pytest
import yaml

from tests.deployment.helm.chart import CHART, ROOT, TYPES, Object, of_kind, only, render, render_ci

DASHBOARDS = sorted((CHART / "dashboards").glob("*.json"))
RULES = sorted((CHART / "rules").glob("*.yml"))


@pytest.mark.parametrize("values", [{}, {"gateway": {"service": {"type": "LoadBalancer"}, "insecure": True}}], ids=str)
def test_one_service_monitor_selects_the_metrics_of_each_service_once(values: Object) -> None:
    values = {**values, "metrics": {"serviceMonitor": {"enabled": True}}}
    spec = only(render(values), "ServiceMonitor")["spec"]
    assert spec["endpoints"] == [{"port": "metrics", "interval": "30s", "scrapeTimeout": "10s"}]
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


def test_the_dashboards_are_in_a_config_map_that_grafana_finds() -> None:
    config_map = only(render_ci("metrics"), "ConfigMap")
    assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert DASHBOARDS
    assert {name: json.loads(text) for name, text in config_map["data"].items()} == {
        path.name: json.loads(path.read_text()) for path in DASHBOARDS
    }
    assert len(json.dumps(config_map)) < 1024 * 1024, "Kubernetes refuses larger objects"


def test_the_rules_equal_the_files_and_keep_prometheus_templates() -> None:
    rule = only(render_ci("metrics"), "PrometheusRule")
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    groups = [group for path in RULES for group in yaml.safe_load(path.read_text())["groups"]]
    assert groups
    assert rule["spec"]["groups"] == groups
    assert len({group["name"] for group in groups}) == len(groups)


def test_the_charts_rules_equal_those_of_prometheus_folder() -> None:
    own = {path.name: path.read_text() for path in (ROOT / "deploy" / "prometheus").glob("*.yml")}
    own = {name: text for name, text in own.items() if "groups" in yaml.safe_load(text)}
    assert {path.name: path.read_text() for path in RULES} == own
