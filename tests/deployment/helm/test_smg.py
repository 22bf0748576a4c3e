"""The router smg in front of the engines of a release: what they publish, who reaches them, and what is refused."""

import pytest

from services.runtime.ports import ENGINE
from tests.deployment.helm.chart import (
    MUTUAL_TLS,
    Object,
    by_name,
    engine_pod,
    merged,
    nested,
    only,
    refusal,
    render,
    selected_by,
    service_container,
    settings_in,
    variables,
)

SMG = nested("engine.settings.smg", True)
OPEN_EVENTS = nested("engine.kvEvents.insecure", True)
CURVE = nested("engine.kvEvents", {"enabled": True, "curve": {"existingSecret": "event-keys"}})
ROUTERS = [{"podSelector": {"matchLabels": {"app": "smg"}}}]


def test_smg_gets_events_with_a_certificate_or_where_the_values_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = settings_in(engine_pod(merged(SMG, OPEN_EVENTS)), "engine", monkeypatch)
    assert (engine.smg, engine.kv_events_insecure, engine.tls_client_ca) == (True, True, "")
    assert engine.kv_events_listen == "", "only smg reads them"
    encrypted = settings_in(engine_pod(merged(SMG, MUTUAL_TLS)), "engine", monkeypatch)
    assert (encrypted.kv_events_insecure, encrypted.tls_client_ca) == (False, "/etc/quire-tls/ca.crt")
    both = settings_in(engine_pod(merged(SMG, CURVE, OPEN_EVENTS)), "engine", monkeypatch)
    assert (both.kv_events_insecure, both.kv_events_curve_key) == (True, "/etc/quire-events/curve.key")
    for one in (engine, encrypted, both):
        one.check_exposure()


def test_all_ranks_of_an_engine_have_the_settings_with_which_it_starts() -> None:
    spread = {"settings": {"smg": True, "tensor_parallel": 2, "device": "cpu"}, "ranks": {"pods": 2}, "replicas": 1}
    template = only(render({"engine": {**spread, "kvEvents": {"insecure": True}}}), "LeaderWorkerSet")["spec"][
        "leaderWorkerTemplate"
    ]
    for which in ("leader", "worker"):
        assert (
            variables(service_container(template[f"{which}Template"], "engine"))["QUIRE_ENGINE_KV_EVENTS_INSECURE"]
            == "true"
        )


def opened_for_smg(values: Object) -> dict[str, list[str]]:
    """Return the pods that each policy for smg selects, and check that it opens the gRPC port for routers alone."""
    rendered = render(merged({"networkPolicy": {"enabled": True, "routers": ROUTERS}}, values))
    of_all = by_name(rendered, "NetworkPolicy")["engine"]["spec"]["ingress"]
    assert [rule for rule in of_all if {"port": ENGINE.grpc} in rule["ports"] and rule["from"] == ROUTERS] == []
    found = {name: one["spec"] for name, one in by_name(rendered, "NetworkPolicy").items() if name.endswith("-smg")}
    for spec in found.values():
        assert spec["policyTypes"] == ["Ingress"]
        assert spec["ingress"] == [{"ports": [{"port": ENGINE.grpc}], "from": ROUTERS}]
    return {name: selected_by(rendered, spec["podSelector"]["matchLabels"]) for name, spec in found.items()}


def test_smg_reaches_the_grpc_port_of_those_engines_alone_that_serve_it() -> None:
    assert opened_for_smg(OPEN_EVENTS) == {}
    assert opened_for_smg(merged(SMG, OPEN_EVENTS)) == {"engine-smg": ["engine"]}
    serving = {"name": "a", "model": "org/a", "settings": {"smg": True}, "kvEvents": {"insecure": True}}
    several = {"models": [serving, {"name": "b", "model": "org/b"}]}
    assert opened_for_smg(several) == {"engine-a-smg": ["engine-a"]}


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        (
            SMG,
            "engine.settings.smg is true, and whoever reaches the gRPC port of a pod would read the token ids of "
            "prompts: set tls.enabled, or engine.kvEvents.insecure",
        ),
        (
            {"models": [{"name": "a", "model": "org/a", "settings": {"smg": True}}]},
            "models[a].settings.smg is true, and whoever reaches the gRPC port of a pod would read the token ids of",
        ),
        (
            merged(SMG, CURVE),
            "engine.settings.smg is true, and whoever reaches the gRPC port of a pod would read the token ids of",
        ),
        (
            merged(SMG, nested("engine.kvEvents.enabled", True)),
            "engine.kvEvents is enabled, and whoever reaches a pod would read the token ids of prompts",
        ),
        (
            merged(SMG, OPEN_EVENTS, nested("engine.settings.kv_events_numbers", "zero")),
            "engine.settings.smg must be false with engine.settings.kv_events_numbers zero, not true: smg continues",
        ),
        (
            merged(SMG, MUTUAL_TLS, CURVE, OPEN_EVENTS),
            "engine.kvEvents has both curve.existingSecret and insecure: events are encrypted, or not",
        ),
    ],
)
def test_values_with_which_anyone_would_read_prompts_are_refused(values: Object, complaint: str) -> None:
    message = refusal(values)
    assert f"- {complaint}" in message
    assert message.count("\n- ") == 1, "only one fault is reported"
