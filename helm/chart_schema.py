"""values.schema.json, generated from values.yaml, the bounds below, and the services' settings."""

import copy
import dataclasses
from typing import Any

from chart_values import Value

from deploy.prometheus.rules import RUNBOOK_URL
from deploy.prometheus.thresholds import PRESETS, THRESHOLDS, Threshold
from services.engine.settings import EngineSettings
from services.gateway.settings import GatewaySettings
from services.kvmanager.settings import KVManagerSettings
from services.runtime.ports import ENGINE, GATEWAY, KV_EVENTS, KVMANAGER

Schema = dict[str, Any]

SETTINGS: dict[str, type[Any]] = {"kvmanager": KVManagerSettings, "engine": EngineSettings, "gateway": GatewaySettings}
# Settings of KV events that the chart derives from `kvEvents`.
OF_EVENTS = {
    *("kv_events_listen", "kv_events_replay_listen", "kv_events_insecure"),
    *("kv_events_curve_key", "kv_events_curve_clients"),
}
# Settings that the chart derives from other values.
OF_THE_CHART = {
    *OF_EVENTS,
    *("listen", "http_listen", "metrics_listen", "map_listen"),
    *("kvmanager", "engines", "model", "engine_id", "keep_blocks", "pinned_prompts", "api_keys", "insecure"),
    *("tls_certificate", "tls_key", "tls_client_ca", "link_ca", "link_certificate", "link_key", "link_server_name"),
}

_STRINGS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
_TEXTS: Schema = {"type": "array", "items": {"type": "string", "minLength": 1}}
_NAMED: Schema = {"type": "array", "items": {"type": "object", "required": ["name"]}}
# Names as Kubernetes and the Gateway API accept them: no scheme, no port, no address. Only the first label can be a
# wildcard.
_LABEL = "[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_HOST_NAME = rf"(\*\.)?({_LABEL}\.)*[a-z]([-a-z0-9]{{0,61}}[a-z0-9])?"
_HOSTS: Schema = {"type": "array", "items": {"type": "string", "maxLength": 253, "pattern": f"^{_HOST_NAME}$"}}
_SERVER_NAME: Schema = {"type": "string", "maxLength": 253, "pattern": rf"^({_LABEL}(\.{_LABEL})*)?$"}
_INGRESS_TLS: Schema = {
    "type": "array",
    "items": {
        "type": "object",
        "additionalProperties": False,
        "properties": {"hosts": _HOSTS, "secretName": {"type": "string"}},
    },
}
# A quoted number would only be refused by Kubernetes.
_TOLERATIONS: Schema = {
    "type": "array",
    "items": {"type": "object", "properties": {"tolerationSeconds": {"type": "integer"}}},
}
_NAME_PART: Schema = {"type": "string", "pattern": "^([a-z]([-a-z0-9]*[a-z0-9])?)?$"}
# As container runtimes accept it, perhaps with a host and its port: no capitals, no tag, no scheme.
_REPOSITORY_PART = "[a-z0-9]+([-._]+[a-z0-9]+)*"
_REPOSITORY: Schema = {
    "type": "string",
    "pattern": f"^({_REPOSITORY_PART}(:[0-9]+)?/)?{_REPOSITORY_PART}(/{_REPOSITORY_PART})*$",
}
_GIVEN: Schema = {"type": "string", "minLength": 1}
_QUANTITY: Schema = {"type": "string", "pattern": "^[0-9]+(k|[KMGTPE]i?)?$"}
_DURATION: Schema = {
    "type": "string",
    "minLength": 2,
    "pattern": "^([0-9]+y)?([0-9]+w)?([0-9]+d)?([0-9]+h)?([0-9]+m)?([0-9]+s)?([0-9]+ms)?$",
}
# Go's format, the only one that cert-manager accepts.
_GO_DURATION: Schema = {"type": "string", "minLength": 2, "pattern": "^([0-9]+h)?([0-9]+m)?([0-9]+s)?$"}
# On the command line Helm takes whole numbers for numbers, but 0.9 for a string. Bounds of a schema do not hold for
# strings, so the chart checks them itself, see `fractions`.
_FRACTION: Schema = {"type": ["number", "string"], "pattern": r"^[0-9]+(\.[0-9]+)?$"}
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum")
_PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
_AT_LEAST_1: Schema = {"type": "integer", "minimum": 1}
# Of pods: a number or a percentage.
_COUNT: Schema = {"type": ["integer", "string"], "minimum": 0, "pattern": "^[0-9]+%$"}
_COUNT_OR_NONE: Schema = {**_COUNT, "pattern": "^([0-9]+%)?$"}
_PROMPT: Schema = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name"],
    "properties": {
        "name": _GIVEN,
        "text": {"type": "string"},
        "chat": {"type": "array", "items": {"type": "object"}},
        "token_ids": {"type": "array", "items": {"type": "integer"}},
        "salt": {"type": "string"},
        "tenant": {"type": "string"},
    },
}


def _threshold(one: Threshold) -> Schema:
    """Return the schema of a threshold of the alerts."""
    strings = [f"{choice:g}" for choice in one.choices]
    bounds: Schema = {"enum": [*one.choices, *strings]} if one.choices else {"exclusiveMinimum": 0}
    most = {} if one.maximum is None else {"maximum": one.maximum}
    return {"description": f"{one.meaning[0].upper()}{one.meaning[1:]}.", **_FRACTION, **bounds, **most}


# Bounds that defaults do not imply, by the longest matching end of a value's path.
BOUNDS: dict[str, Schema] = {
    "nameOverride": _NAME_PART,
    "fullnameOverride": _NAME_PART,
    "model": _GIVEN,
    "image.repository": _REPOSITORY,
    "image.tag": {"type": "string", "pattern": "^([A-Za-z0-9_][-A-Za-z0-9_.]{0,127})?$"},
    "image.digest": {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
    "image.pullPolicy": {"type": "string", "enum": ["Always", "IfNotPresent", "Never"]},
    "imagePullSecrets": _NAMED,
    "modelCache.size": _QUANTITY,
    "persistence.accessModes": {
        "type": "array",
        "minItems": 1,
        "items": {"enum": ["ReadWriteOnce", "ReadWriteMany", "ReadWriteOncePod"]},
    },
    "terminationMarginSeconds": _AT_LEAST_1,
    "revisionHistoryLimit": {"type": "integer", "minimum": 0},
    "kvmanager.placement": {"type": "string", "enum": ["shared", "model", "engine"]},
    "priorityClass.value": {"type": "integer", "minimum": -(2**31), "maximum": 10**9},
    "priorityClass.preemptionPolicy": {"type": "string", "enum": ["PreemptLowerPriority", "Never"]},
    "gateway.antiAffinity": {"type": "string", "enum": ["preferred", "required", "none"]},
    "tls.serverName": _SERVER_NAME,
    "clients.serverName": _SERVER_NAME,
    "issuerRef.kind": {"type": "string", "enum": ["Issuer", "ClusterIssuer"]},
    "issuerRef.group": _GIVEN,
    "certManager.duration": _GO_DURATION,
    "certManager.renewBefore": _GO_DURATION,
    "clients.dnsNames": _HOSTS,
    "serviceMonitor.interval": _DURATION,
    "serviceMonitor.scrapeTimeout": _DURATION,
    "prometheusRule.preset": {"type": "string", "enum": list(PRESETS)},
    "prometheusRule.thresholds": {
        "type": "object",
        "additionalProperties": False,
        "properties": {one.name: _threshold(one) for one in THRESHOLDS},
    },
    "prometheusRule.runbookUrl": {"type": "string", "pattern": RUNBOOK_URL},
    "labels": _STRINGS,
    "annotations": _STRINGS,
    "apiKey.key": _GIVEN,
    "replicas": _AT_LEAST_1,
    "startupFailureThreshold": _AT_LEAST_1,
    "terminationGracePeriodSeconds": {"type": "integer", "minimum": 0},
    "preStopSeconds": {"type": "integer", "minimum": 0},
    "rollingUpdate.maxSurge": _COUNT,
    "rollingUpdate.maxUnavailable": _COUNT,
    "podDisruptionBudget.minAvailable": _COUNT_OR_NONE,
    "podDisruptionBudget.maxUnavailable": _COUNT_OR_NONE,
    "autoscaling.minReplicas": _AT_LEAST_1,
    "autoscaling.maxReplicas": _AT_LEAST_1,
    "autoscaling.cpuPercent": _AT_LEAST_1,
    "keda.pollingSeconds": _AT_LEAST_1,
    "keda.prometheusAddress": {"type": "string", "pattern": "^(https?://.+)?$"},
    "ranks.pods": _AT_LEAST_1,
    "ranks.port": _PORT,
    "endpointPicker.port": _PORT,
    "endpointPicker.failureMode": {"type": "string", "enum": ["FailOpen", "FailClose"]},
    "shmSize": _QUANTITY,
    "keepBlocks.sizeLimit": {**_QUANTITY, "pattern": "^([0-9]+(k|[KMGTPE]i?)?)?$"},
    "service.type": {"type": "string", "enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
    "ingress.hosts": _HOSTS,
    "ingress.tls": _INGRESS_TLS,
    "http.parentRefs": _NAMED,
    "grpc.parentRefs": _NAMED,
    "http.hostnames": {**_HOSTS, "maxItems": 16},
    "grpc.hostnames": {**_HOSTS, "maxItems": 16},
    # As in the Gateway API.
    "http.timeout": {"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"},
    "modelFetch.timeoutSeconds": _AT_LEAST_1,
    "gateway.pinnedPrompts": {"type": "array", "items": _PROMPT},
    "extraArgs": _TEXTS,
    "extraEnv": _NAMED,
    "extraVolumes": _NAMED,
    "extraVolumeMounts": _NAMED,
    "initContainers": _NAMED,
    "extraContainers": _NAMED,
    "podAnnotations": _STRINGS,
    "podLabels": _STRINGS,
    "nodeSelector": _STRINGS,
    "tolerations": _TOLERATIONS,
}


def schema_of(values: list[Value]) -> Schema:
    """Return the schema of values.yaml. Helm refuses unknown keys and values out of bounds."""
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the chart quire",
        **_level(values, ()),
    }
    schema["properties"] = {
        "global": {"description": "Helm adds this to a chart that is part of another.", "type": "object"},
        **schema["properties"],
    }
    for component, settings_type in SETTINGS.items():
        schema["properties"][component]["properties"]["settings"]["properties"] = settings_schema(settings_type)
    schema["properties"]["models"]["items"] = _one_of_several_models(schema["properties"]["engine"])
    return schema


def fractions(schema: Schema) -> dict[str, dict[str, Schema]]:
    """Return the bounds of the fractions below each key of the schema that has some."""
    of_rules = schema["properties"]["metrics"]["properties"]["prometheusRule"]["properties"]["thresholds"]
    below = {component: schema["properties"][component]["properties"]["settings"] for component in SETTINGS}
    return {
        key: {name: found for name, one in level["properties"].items() if (found := _bounds_of_fraction(one))}
        for key, level in {**below, "thresholds": of_rules}.items()
    }


def ports() -> dict[str, dict[str, int]]:
    """Return the ports of each component, by the names that its service gives them."""
    return {
        "kvmanager": {"grpc": KVMANAGER.grpc, "map": KVMANAGER.http, "metrics": KVMANAGER.metrics},
        "engine": {"grpc": ENGINE.grpc, "metrics": ENGINE.metrics},
        "gateway": {"grpc": GATEWAY.grpc, "http": GATEWAY.http, "metrics": GATEWAY.metrics},
        "events": {"kv-events": KV_EVENTS.events, "kv-replay": KV_EVENTS.replay},
    }


def requirements() -> list[dict[str, Any]]:
    """Return what settings of an engine require of each other. A text compares values, but for fractions."""
    fields = {field.name: field for field in dataclasses.fields(EngineSettings)}
    return [
        {
            "name": name,
            "default": field.default,
            "of": [_text(value) for value in one.of],
            "besides": [_text(value) for value in one.besides],
            "where": dict(one.where),
            "other": one.other,
            "otherDefault": fields[one.other].default,
            "among": [_text(value) for value in one.among],
            "without": [_text(value) for value in one.without],
            "most": one.most,
            "permitted": one.permitted(),
            "because": one.because,
        }
        for name, field in fields.items()
        for one in field.metadata["requires"]
    ]


def _text(value: Any) -> str:
    """Return a value as Helm's `toString` writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _bounds_of_fraction(schema: Schema) -> Schema:
    if schema["type"] != _FRACTION["type"]:
        return {}
    return {name: schema[name] for name in _BOUNDS if name in schema}


def settings_schema(settings_type: type[Any]) -> Schema:
    """Return the schema of the settings that users of the chart can set."""
    return {
        field.name: _setting(field) for field in dataclasses.fields(settings_type) if field.name not in OF_THE_CHART
    }


def _setting(field: "dataclasses.Field[Any]") -> Schema:
    metadata = field.metadata
    bounds = {"minimum": metadata["least"], "maximum": metadata["most"], "enum": list(metadata["choices"]) or None}
    return {
        "description": metadata["meaning"],
        **(_FRACTION if isinstance(field.default, float) else {"type": _type_of(field.default)}),
        **{name: bound for name, bound in bounds.items() if bound is not None},
    }


def _level(values: list[Value], path: tuple[str, ...]) -> Schema:
    """Return the schema of the keys directly below `path`."""
    here = [value for value in values if value.path[:-1] == path]
    required = [value.path[-1] for value in here if _is_required(value)]
    return {
        "type": "object",
        "additionalProperties": False,
        **({"required": required} if required else {}),
        "properties": {value.path[-1]: _level(values, value.path) if value.section else _leaf(value) for value in here},
    }


def _is_required(value: Value) -> bool:
    """Return True if the value cannot be removed, which Helm does for null."""
    return value.default != "" and not isinstance(value.default, dict | list)


def _leaf(value: Value) -> Schema:
    return {"description": value.meaning, **(_bounds(value.path) or _inferred(value.default))}


def _bounds(path: tuple[str, ...]) -> Schema | None:
    ends = [".".join(path[first:]) for first in range(len(path))]
    return next((copy.deepcopy(BOUNDS[end]) for end in ends if end in BOUNDS), None)


def _inferred(default: Any) -> Schema:
    if isinstance(default, list):
        return {"type": "array", "items": {"type": "object"}}
    return {"type": _type_of(default), **({"minimum": 0} if type(default) is int else {})}


def _type_of(default: Any) -> str:
    return {str: "string", int: "integer", bool: "boolean", dict: "object"}[type(default)]


def _one_of_several_models(engine: Schema) -> Schema:
    """Return the schema of an entry of `models`. It is merged over `engine`, so none of those keys is required."""
    entry = _without_required(engine)
    own = {
        "name": {
            "description": "Part of the names of its objects: up to 63 lower-case letters, digits and hyphens.",
            "type": "string",
        },
        "model": {"description": "Model, as above.", **_GIVEN},
    }
    return {**entry, "required": ["name", "model"], "properties": {**own, **entry["properties"]}}


def _without_required(schema: Schema) -> Schema:
    inner = {name: _without_required(below) for name, below in schema.get("properties", {}).items()}
    kept = {key: value for key, value in schema.items() if key not in ("required", "description")}
    return {**kept, **({"properties": inner} if inner else {})}
