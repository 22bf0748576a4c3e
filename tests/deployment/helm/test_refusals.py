"""Invalid and inconsistent values are refused with their path and the reason."""

from typing import Any

import pytest

from tests.deployment.helm.chart import Object, merged, nested, refusal, render

A_MODEL = {"name": "a", "model": "org/a"}


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        ("gatway", {}, "at '': additional properties 'gatway' not allowed"),
        ("kvmanager.replicas", 2, "at '/kvmanager': additional properties 'replicas' not allowed"),
        ("engine.settings.blocksize", 16, "at '/engine/settings': additional properties 'blocksize' not allowed"),
        ("engine.settings.listen", "x:1", "at '/engine/settings': additional properties 'listen' not allowed"),
        ("engine.settings.block_size", 0, "at '/engine/settings/block_size': minimum: got 0, want 1"),
        ("engine.settings.block_size", 5000, "at '/engine/settings/block_size': maximum: got 5,000, want 4,096"),
        ("engine.settings.rank_seconds", "1e3", "at '/engine/settings/rank_seconds': '1e3' does not match pattern"),
        ("engine.settings.rank_seconds", "0.4", "engine.settings.rank_seconds is 0.4, but it must be at least 0.5"),
        ("kvmanager.settings.kv_cache_metrics_sample", "1.5", "metrics_sample is 1.5, but it must be at most 1"),
        (
            "models",
            [{**A_MODEL, "settings": {"gpu_memory_utilization": "1.5"}}],
            "models[a].settings.gpu_memory_utilization is 1.5, but it must be at most 1",
        ),
        ("engine.settings.token_budget", "512", "at '/engine/settings/token_budget': got string, want integer"),
        ("engine.settings.dtype", "float8", "at '/engine/settings/dtype': value must be one of 'auto', 'float32'"),
        ("gateway.settings.grace_seconds", -1, "at '/gateway/settings/grace_seconds': minimum: got -1, want 0"),
        ("gateway.settings.grace_seconds", None, "at '/gateway/settings': missing property 'grace_seconds'"),
        ("engine.replicas", 0, "at '/engine/replicas': minimum: got 0, want 1"),
        ("gateway.replicas", 0, "at '/gateway/replicas': minimum: got 0, want 1"),
        ("engine.autoscaling.minReplicas", 0, "at '/engine/autoscaling/minReplicas': minimum: got 0, want 1"),
        ("gateway.apiKeys.secret", "x", "at '/gateway/apiKeys': additional properties 'secret' not allowed"),
        ("gateway.service.type", "Public", "at '/gateway/service/type': value must be one of 'ClusterIP', 'NodePort'"),
        ("terminationMarginSeconds", 0, "at '/terminationMarginSeconds': minimum: got 0, want 1"),
        ("image.pullPolicy", "Sometimes", "at '/image/pullPolicy': value must be one of 'Always', 'IfNotPresent'"),
        ("image.digest", "sha256:0", "at '/image/digest': 'sha256:0' does not match pattern"),
        ("modelCache.size", "20 GB", "at '/modelCache/size': '20 GB' does not match pattern"),
        ("metrics.serviceMonitor.interval", "30", "at '/metrics/serviceMonitor/interval': '30' does not match"),
        ("metrics.serviceMonitor.interval", "", "at '/metrics/serviceMonitor/interval': minLength: got 0, want 2"),
        ("tls.certManager.duration", "90d", "at '/tls/certManager/duration': '90d' does not match pattern"),
        ("engine.nodeSelector", {"gpu": True}, "at '/engine/nodeSelector/gpu': got boolean, want string"),
        ("engine.rollingUpdate.maxSurge", "1", "at '/engine/rollingUpdate/maxSurge': '1' does not match pattern"),
        ("models", [{"name": "a"}], "at '/models/0': missing property 'model'"),
        ("kvmanager.placement", "node", "at '/kvmanager/placement': value must be one of 'shared', 'model', 'engine'"),
        ("gateway.routes.http.timeout", "1.5h", "at '/gateway/routes/http/timeout': '1.5h' does not match pattern"),
        ("gateway.ingress.hosts", ["https://a.org"], "at '/gateway/ingress/hosts/0': 'https://a.org' does not match"),
        ("gateway.ingress.tls", [{"hosts": ["*"]}], "at '/gateway/ingress/tls/0/hosts/0': '*' does not match"),
        ("gateway.routes.http.hostnames", ["a.org:80"], "at '/gateway/routes/http/hostnames/0': 'a.org:80' does not"),
        ("gateway.routes.grpc.hostnames", ["1.2.3.4"], "at '/gateway/routes/grpc/hostnames/0': '1.2.3.4' does not"),
        ("tls.clients.dnsNames", ["A.org"], "at '/tls/clients/dnsNames/0': 'A.org' does not match"),
        ("tls.serverName", "a..b", "at '/tls/serverName': 'a..b' does not match"),
        (
            "engine.tolerations",
            [{"key": "pool", "tolerationSeconds": "9"}],
            "at '/engine/tolerations/0/tolerationSeconds': got string, want integer",
        ),
        ("models", [{**A_MODEL, "replica": 2}], "at '/models/0': additional properties 'replica' not allowed"),
        (
            "models",
            [{**A_MODEL, "settings": {"block_size": 0}}],
            "at '/models/0/settings/block_size': minimum: got 0, want 1",
        ),
    ],
)
def test_a_wrong_value_is_refused_naming_its_path_and_bound(path: str, value: Any, complaint: str) -> None:
    assert complaint in refusal(nested(path, value))


KEDA = {"enabled": True, "prometheusAddress": "http://prometheus:9090"}
SECRETS = {"kvmanager": "a", "engine": "a", "gateway": "a"}
TLS = {"enabled": True, "existingSecrets": SECRETS}
BUDGET = {"enabled": True}
CPU = {"requests": {"cpu": 1}}
FETCH = {
    "modelFetch": {"enabled": True},
    "modelCache": {"persistence": {"enabled": True, "existingClaim": "models"}},
}
FOR_ONE_POD = {"enabled": True, "accessModes": ["ReadWriteOncePod"]}
FOR_ONE_NODE = {"enabled": True, "accessModes": ["ReadWriteOnce"]}
ON_ONE_NODE = {"replicas": 2, "nodeSelector": {"kubernetes.io/hostname": "a"}}
LOST = {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute"}

# Values and helm's message, by fault.
INCONSISTENT: dict[str, tuple[Object, str]] = {
    "engines-killed-during-their-drain": (
        {"engine": {"terminationGracePeriodSeconds": 25}},
        "engine.terminationGracePeriodSeconds is 25, but the pod drains for 25 s (settings.grace_seconds): "
        "Kubernetes would kill it before its end",
    ),
    "gateways-killed-during-their-drain": (
        {"gateway": {"terminationGracePeriodSeconds": 33}},
        "gateway.terminationGracePeriodSeconds is 33, but the pod drains for 35 s (settings.grace_seconds and "
        "preStopSeconds): Kubernetes would kill it before its end",
    ),
    "a-model-killed-during-its-drain": (
        {"models": [{**A_MODEL, "terminationGracePeriodSeconds": 9, "settings": {"grace_seconds": 10}}]},
        "models[a].terminationGracePeriodSeconds is 9, but the pod drains for 10 s",
    ),
    "a-kv-manager-that-stops-first": (
        {"engine": {"settings": {"grace_seconds": 45}}},
        "kvmanager.settings.grace_seconds is 45, but engine.settings.grace_seconds is 45: the KV manager would stop "
        "before its engines",
    ),
    "a-kv-manager-that-stops-before-one-model": (
        {"models": [A_MODEL, {"name": "b", "model": "org/b", "settings": {"grace_seconds": 60.5}}]},
        "kvmanager.settings.grace_seconds is 45, but models[b].settings.grace_seconds is 60.5: the KV manager would "
        "stop before its engines",
    ),
    "a-rollout-without-room": (
        {"engine": {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": "0%"}}},
        "engine.rollingUpdate has maxSurge and maxUnavailable of 0: no pod could ever be replaced",
    ),
    "two-autoscalers": (
        {"engine": {"autoscaling": {"hpa": {"enabled": True}, "keda": KEDA}}},
        "engine.autoscaling has both hpa and keda enabled: enable one of them",
    ),
    "a-minimum-above-the-maximum": (
        {"engine": {"autoscaling": {"hpa": {"enabled": True}, "minReplicas": 5}}},
        "engine.autoscaling.minReplicas is 5, but maxReplicas is 4",
    ),
    "a-minimum-above-the-maximum-of-gateways": (
        {
            "gateway": {
                "autoscaling": {"hpa": {"enabled": True}, "maxReplicas": 1},
                "resources": {"requests": {"cpu": 1}},
            }
        },
        "gateway.autoscaling.minReplicas is 2, but maxReplicas is 1",
    ),
    "an-autoscaler-without-a-metric": (
        {"engine": {"autoscaling": {"hpa": {"enabled": True}, "waitingRequests": 0}}},
        "engine.autoscaling has no metric to scale by: set waitingRequests or runningRequests",
    ),
    "cpu-scaling-without-a-request": (
        {"gateway": {"autoscaling": {"hpa": {"enabled": True}}}},
        "gateway.autoscaling.hpa scales by the requested CPU, but gateway.resources.requests.cpu is not set",
    ),
    "keda-without-prometheus": (
        {"engine": {"autoscaling": {"keda": {"enabled": True}}}},
        "engine.autoscaling.keda needs prometheusAddress",
    ),
    "a-fallback-above-the-maximum": (
        {"engine": {"autoscaling": {"keda": {**KEDA, "fallbackReplicas": 5}}}},
        "engine.autoscaling.keda.fallbackReplicas is 5, but maxReplicas is 4",
    ),
    "a-budget-of-all-pods": (
        {"gateway": {"podDisruptionBudget": {**BUDGET, "minAvailable": 2}, "replicas": 2}},
        "gateway.podDisruptionBudget.minAvailable is 2 of 2 pods: no node with one of them could ever be drained",
    ),
    "a-budget-whose-percentage-is-all": (
        {"engine": {"podDisruptionBudget": {**BUDGET, "minAvailable": "51%"}, "replicas": 2}},
        "engine.podDisruptionBudget.minAvailable is 51% of 2 pods",
    ),
    "a-budget-of-all-pods-of-an-autoscaler": (
        {
            "engine": {
                "podDisruptionBudget": {**BUDGET, "minAvailable": 2},
                "replicas": 4,
                "autoscaling": {"minReplicas": 2, "hpa": {"enabled": True}},
            }
        },
        "engine.podDisruptionBudget.minAvailable is 2 of 2 pods",
    ),
    "a-budget-without-disruption": (
        {"engine": {"podDisruptionBudget": {**BUDGET, "maxUnavailable": 0}}},
        "engine.podDisruptionBudget.maxUnavailable is 0: no node with one of the pods could ever be drained",
    ),
    "a-budget-of-two-kinds": (
        {"engine": {"podDisruptionBudget": {**BUDGET, "maxUnavailable": 1, "minAvailable": 1}, "replicas": 2}},
        "engine.podDisruptionBudget has both minAvailable and maxUnavailable: set one of them",
    ),
    "model-and-models": (
        {"model": "org/b", "models": [A_MODEL]},
        "model and models are both given: the engines run either that model or those",
    ),
    "a-name-of-a-model-with-capitals": (
        {"models": [{"name": "Llama-3.1", "model": "org/a"}]},
        'models has the name "Llama-3.1": a name has at most 63 characters, which are lower-case letters, digits and '
        "hyphens, and no hyphen at an end",
    ),
    "a-name-of-a-model-of-64-characters": (
        {"models": [{"name": "m" * 64, "model": "org/a"}]},
        f'models has the name "{"m" * 64}": a name has at most 63 characters',
    ),
    "duplicate-names-of-models": ({"models": [A_MODEL, A_MODEL]}, "models has a twice: names must be unique"),
    "duplicate-served-names": (
        {"models": [A_MODEL, {"name": "b", "model": "other/a"}]},
        "models has org/a and other/a under one name, a: set settings.model_name of one of them",
    ),
    "an-unused-claim": (
        {"modelCache": {"persistence": {"existingClaim": "models"}}},
        "modelCache.persistence.existingClaim is set, but persistence is not enabled: each pod would fetch its own",
    ),
    "a-claim-for-one-pod": (
        {
            "modelCache": {"persistence": FOR_ONE_POD},
            "engine": {"replicas": 2},
        },
        "modelCache.persistence.accessModes has ReadWriteOncePod, but the engines have 2 pods: all but one would never",
    ),
    "a-claim-for-one-node": (
        {"modelCache": {"persistence": FOR_ONE_NODE}, "models": [A_MODEL, {"name": "b", "model": "org/b"}]},
        "modelCache.persistence.accessModes is ReadWriteOnce, but the engines have 2 pods: those on a second node "
        "would never start, so use ReadWriteMany, or one node for all engines (engine.nodeSelector with "
        "kubernetes.io/hostname)",
    ),
    "a-claim-for-the-ranks-of-one-pod": (
        {
            "modelCache": {"persistence": FOR_ONE_POD},
            "engine": {"settings": {"tensor_parallel": 2, "grace_seconds": 20}, "ranks": {"pods": 2}},
        },
        "modelCache.persistence.accessModes has ReadWriteOncePod, but the engines have 2 pods: all but one would never",
    ),
    "a-claim-for-one-node-and-a-rollout-that-adds-a-pod": (
        {
            "modelCache": {"persistence": FOR_ONE_NODE},
            "engine": {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        },
        "modelCache.persistence.accessModes is ReadWriteOnce, but the engines have 2 pods during a rollout: those on",
    ),
    "a-variable-of-a-setting": (
        {"engine": {"extraEnv": [{"name": "QUIRE_ENGINE_GRACE_SECONDS", "value": "9"}]}},
        "engine.extraEnv has QUIRE_ENGINE_GRACE_SECONDS, which is a setting: set engine.settings.grace_seconds",
    ),
    "a-variable-of-a-models-setting": (
        {"models": [{**A_MODEL, "extraEnv": [{"name": "QUIRE_ENGINE_DTYPE", "value": "float32"}]}]},
        "models[a].extraEnv has QUIRE_ENGINE_DTYPE, which is a setting: set models[a].settings.dtype",
    ),
    "a-variable-twice": (
        {"kvmanager": {"extraEnv": [{"name": "TZ", "value": "UTC"}, {"name": "TZ", "value": "CET"}]}},
        "kvmanager.extraEnv has TZ twice",
    ),
    "tls-without-a-secret": (
        {"tls": {"enabled": True, "existingSecrets": {"engine": "a"}}},
        "tls needs a Secret for each of kvmanager, engine and gateway: name them in tls.existingSecrets, or enable "
        "tls.certManager",
    ),
    "tls-values-without-tls": (
        {"tls": {"existingSecrets": SECRETS}},
        "tls has values, but is not enabled: nothing would be encrypted",
    ),
    "two-sources-of-certificates": (
        {"tls": {**TLS, "certManager": {"enabled": True, "issuerRef": {"name": "quire"}}}},
        "tls has both existingSecrets and certManager enabled: certificates come from one of them",
    ),
    "certificates-without-an-issuer": (
        {"tls": {"enabled": True, "certManager": {"enabled": True}}},
        "tls.certManager needs issuerRef.name",
    ),
    "a-certificate-without-a-name": (
        {"tls": {**TLS, "clients": {"existingSecret": "public"}}},
        "tls.clients.serverName is missing: the test pod must know a name in the certificate of "
        "tls.clients.existingSecret",
    ),
    "names-without-a-certificate": (
        {"tls": {**TLS, "clients": {"dnsNames": ["llm.example.org"]}}},
        "tls.clients.dnsNames are for a certificate that tls.certManager makes, and it makes none for clients",
    ),
    "a-public-service-without-keys": (
        {"gateway": {"service": {"type": "LoadBalancer"}}},
        "gateway.service.type is LoadBalancer, which opens the gateway beyond the cluster without API keys: "
        "set gateway.apiKeys.existingSecret, or gateway.insecure",
    ),
    "a-public-ingress-without-keys": (
        {"gateway": {"ingress": {"enabled": True, "hosts": ["llm.example.org"]}}},
        "gateway.ingress is enabled, which opens the gateway beyond the cluster without API keys: "
        "set gateway.apiKeys.existingSecret, or gateway.insecure",
    ),
    "an-ingress-without-hosts": (
        {"gateway": {"ingress": {"enabled": True}, "insecure": True}},
        "gateway.ingress needs hosts",
    ),
    "a-public-route-without-keys": (
        {"gateway": {"routes": {"http": {"enabled": True, "parentRefs": [{"name": "public"}]}}}},
        "gateway.routes.http is enabled, which opens the gateway beyond the cluster without API keys: "
        "set gateway.apiKeys.existingSecret, or gateway.insecure",
    ),
    "a-route-without-a-gateway": (
        {"gateway": {"routes": {"grpc": {"enabled": True}}, "insecure": True}},
        "gateway.routes.grpc needs parentRefs: the Gateways that it belongs to",
    ),
    "two-routes-of-one-name": (
        {
            "gateway": {
                "routes": {
                    "http": {"enabled": True, "parentRefs": [{"name": "public"}], "hostnames": ["a.org", "b.org"]},
                    "grpc": {"enabled": True, "parentRefs": [{"name": "public"}], "hostnames": ["b.org"]},
                },
                "insecure": True,
            }
        },
        "gateway.routes.http and gateway.routes.grpc share host names at public: it would accept only one of them, so "
        "give each its own hostnames or sectionName",
    ),
    "two-routes-of-all-names": (
        {
            "gateway": {
                "routes": {
                    "http": {"enabled": True, "parentRefs": [{"name": "public"}], "hostnames": ["a.org"]},
                    "grpc": {"enabled": True, "parentRefs": [{"name": "public"}]},
                },
                "insecure": True,
            }
        },
        "gateway.routes.http and gateway.routes.grpc share host names at public",
    ),
    "gateways-that-need-another-node": (
        {"gateway": {"antiAffinity": "required"}},
        "gateway.antiAffinity is required, but gateway.rollingUpdate.maxUnavailable is 0: with as many nodes as pods, "
        "a rollout would wait for another node",
    ),
    "a-kv-manager-that-returns-too-late": (
        {"models": [A_MODEL, {"name": "b", "model": "org/b", "settings": {"seconds_without_kvmanager": 10}}]},
        "kvmanager.lostNodeSeconds is 10, but models[b].settings.seconds_without_kvmanager is 10: requests would fail "
        "before a new KV manager starts",
    ),
    "a-kv-manager-whose-toleration-outlasts-the-patience": (
        {"kvmanager": {"tolerations": [{**LOST, "tolerationSeconds": 30}]}},
        "kvmanager.tolerations has node.kubernetes.io/unreachable with tolerationSeconds of 30, but "
        "engine.settings.seconds_without_kvmanager is 30: requests would fail before a new KV manager starts",
    ),
    "a-kv-manager-that-stays-on-a-lost-node": (
        {"kvmanager": {"tolerations": [{"key": "node.kubernetes.io/not-ready", "operator": "Exists"}]}},
        "kvmanager.tolerations has node.kubernetes.io/not-ready without tolerationSeconds, but "
        "engine.settings.seconds_without_kvmanager is 30: the KV manager would stay on a lost node, and requests",
    ),
    "two-priority-classes": (
        {"kvmanager": {"priorityClassName": "serving", "priorityClass": {"create": True}}},
        "kvmanager.priorityClassName is set, but kvmanager.priorityClass.create too: the pods have one PriorityClass",
    ),
    "a-pod-of-a-kv-manager-beside-its-engine": (
        {"kvmanager": {"placement": "engine", "nodeSelector": {"pool": "cpu"}}},
        "kvmanager.nodeSelector is set, but kvmanager.placement is engine: it is a container of the engines' pods",
    ),
    "a-priority-of-a-kv-manager-beside-its-engine": (
        {"kvmanager": {"placement": "engine", "priorityClass": {"create": True}}},
        "kvmanager.priorityClass.create is set, but kvmanager.placement is engine: it is a container of the engines'",
    ),
    "an-engine-killed-before-the-kv-manager-beside-it": (
        {"kvmanager": {"placement": "engine"}, "engine": {"terminationGracePeriodSeconds": 45}},
        "engine.terminationGracePeriodSeconds is 45, but the pod drains for 45 s (kvmanager.settings.grace_seconds): "
        "Kubernetes would kill it before its end",
    ),
    "models-fetched-into-nothing": (
        {"modelFetch": {"enabled": True}},
        "modelFetch is enabled, but not modelCache.persistence with an existingClaim: a claim of the chart does not "
        "exist before an install",
    ),
    "no-model-to-fetch": (
        {**FETCH, "model": "/var/cache/quire/mine"},
        "modelFetch is enabled, but the models are folders: nothing would be fetched",
    ),
    "models-fetched-from-nowhere": (
        {**FETCH, "networkPolicy": {"enabled": True, "modelSources": []}},
        "modelFetch is enabled, but networkPolicy.modelSources is empty: nothing could be fetched",
    ),
    "a-key-without-required-keys": (
        {"test": {"apiKey": {"existingSecret": "key"}}},
        "test.apiKey.existingSecret is set, but the gateway requires no key",
    ),
}


@pytest.mark.parametrize("name", INCONSISTENT)
def test_incompatible_values_are_refused_with_the_reason(name: str) -> None:
    values, complaint = INCONSISTENT[name]
    message = refusal(values)
    assert f"- {complaint}" in message
    assert message.count("\n- ") == 1, "only one fault is reported"


def test_all_invalid_values_are_reported_at_once() -> None:
    chosen = ["two-autoscalers", "a-key-without-required-keys", "tls-values-without-tls"]
    message = refusal(merged(*(INCONSISTENT[name][0] for name in chosen)))
    assert [INCONSISTENT[name][1] in message for name in chosen] == [True] * 3


@pytest.mark.parametrize(
    "values",
    [
        {"engine": {"terminationGracePeriodSeconds": 31}},
        {"gateway": {"terminationGracePeriodSeconds": 36}},
        {"engine": {"settings": {"grace_seconds": 44.5}}},
        {"engine": {"podDisruptionBudget": {**BUDGET, "minAvailable": "50%"}, "replicas": 2}},
        {"engine": {"podDisruptionBudget": {**BUDGET, "maxUnavailable": 1}}},
        {"modelCache": {"persistence": FOR_ONE_POD}},
        {"modelCache": {"persistence": FOR_ONE_NODE}, "engine": ON_ONE_NODE},
        {"modelCache": {"persistence": {**FOR_ONE_NODE, "existingClaim": "models"}}, "engine": {"replicas": 2}},
        {"kvmanager": {"tolerations": [{**LOST, "tolerationSeconds": 29}, {"operator": "Exists"}]}},
        {"kvmanager": {"tolerations": [{**LOST, "effect": "NoSchedule"}]}},
        {"gateway": {"ingress": {"enabled": True, "hosts": ["*.a-1.org", "localhost"]}, "insecure": True}},
        {"gateway": {"service": {"type": "NodePort"}, "insecure": True}},
        {"models": [A_MODEL, {"name": "b", "model": "org/a"}]},
        {"global": {"region": "north"}},
        {"models": [{"name": "3" + "m" * 62, "model": "org/a"}]},
        {"gateway": {"antiAffinity": "required", "rollingUpdate": {"maxUnavailable": 1}}},
        {"kvmanager": {"lostNodeSeconds": 29}},
        {"kvmanager": {"placement": "engine", "lostNodeSeconds": 99}},
        {**FETCH, "model": "/var/cache/quire/mine.gguf"},
    ],
    ids=str,
)
def test_values_at_their_bounds_are_accepted(values: Object) -> None:
    assert render(values)
