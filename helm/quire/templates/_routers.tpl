{{/*
Routers of others in front of the engines. They choose a pod: by HTTP, so that the pod needs a gateway of its own; by KV
events, which the engine publishes; by labels, which tell them what the pod is.
*/}}

{{/* True for pods with a gateway beside the engine, from the parameters of quire.deployment. */}}
{{- define "quire.hasPodGateway" -}}
{{- if and (eq .component "engine") (not .otherRank) }}
{{- if or .values.podGateway.enabled .values.inferencePool.enabled .values.aibrix.enabled }}true{{ end }}
{{- end }}
{{- end }}

{{/*
The parameters of the gateway beside an engine, as those of quire.deployment. It calls that engine alone, so it looks up
no prefixes, and the other gateways pin the prompts.
*/}}
{{- define "quire.podGateway" -}}
{{- $values := merge (dict "resources" .values.podGateway.resources "pinnedPrompts" list) (omit .root.Values.gateway "resources" "pinnedPrompts") }}
{{- $settings := dict "engines" (printf "127.0.0.1:%s" (include "quire.port" (dict "root" .root "component" "engine"))) }}
{{- $_ := include "quire.overlay" (dict "base" $settings "over" (include "quire.accessSettings" .root | fromJson)) }}
{{- toJson (dict
  "component" "gateway"
  "values" $values
  "settings" $settings
  "sidecar" true
  "portPrefix" "gw-"
  "preStopSeconds" (include "quire.preStopSeconds" . | int)
) }}
{{- end }}

{{/* Settings of a gateway about who may call it, as JSON. */}}
{{- define "quire.accessSettings" -}}
{{- if .Values.gateway.apiKeys.existingSecret }}
{{- toJson (dict "api_keys" "/etc/quire-keys/api_keys.toml") }}
{{- else }}
{{- /* Only without keys: otherwise the gateway would not listen on the network of the pods. */}}
{{- toJson (dict "insecure" true) }}
{{- end }}
{{- end }}

{{/* True for containers that publish KV events, from the parameters of quire.deployment. */}}
{{- define "quire.publishesEvents" -}}
{{- if and (eq .component "engine") (not .otherRank) .values.kvEvents.enabled }}true{{ end }}
{{- end }}

{{/* True if smg, and whoever else reaches the gRPC port, reads KV events without a certificate, from `root` and `values`. */}}
{{- define "quire.smgInPlainText" -}}
{{- if and (dig "smg" false .values.settings) (not .root.Values.tls.enabled) }}true{{ end }}
{{- end }}

{{/* The ports of KV events by their names, as JSON: the services' defaults. */}}
{{- define "quire.eventPorts" -}}
{{- if include "quire.publishesEvents" . }}
{{- toJson (.root.Files.Get "ports.json" | fromJson).events }}
{{- else }}{}{{ end }}
{{- end }}

{{/* The settings of KV events that the chart decides, as JSON. The topic has the pod's name, which the engine's id is. */}}
{{- define "quire.eventSettings" -}}
{{- $settings := dict }}
{{- if include "quire.publishesEvents" . }}
{{- $ports := include "quire.eventPorts" . | fromJson }}
{{- $_ := set $settings "kv_events_listen" (printf "0.0.0.0:%v" (get $ports "kv-events")) }}
{{- $_ := set $settings "kv_events_replay_listen" (printf "0.0.0.0:%v" (get $ports "kv-replay")) }}
{{- if .values.kvEvents.curve.existingSecret }}
{{- $_ := set $settings "kv_events_curve_key" "/etc/quire-events/curve.key" }}
{{- $_ := set $settings "kv_events_curve_clients" "/etc/quire-events/curve.clients" }}
{{- end }}
{{- if not (hasKey .values.settings "kv_events_topic") }}
{{- $_ := set $settings "kv_events_topic" (printf "kv@$(QUIRE_ENGINE_ENGINE_ID)@%s" .served) }}
{{- end }}
{{- if and .values.aibrix.enabled (not (hasKey .values.settings "kv_events_form")) }}
{{- $_ := set $settings "kv_events_form" "array" }}
{{- end }}
{{- end }}
{{- if eq .component "engine" }}
{{- if and .values.kvEvents.insecure (or (include "quire.publishesEvents" .) (include "quire.smgInPlainText" .)) }}
{{- $_ := set $settings "kv_events_insecure" true }}
{{- end }}
{{- end }}
{{- toJson $settings }}
{{- end }}

{{- define "quire.eventKeysMount" -}}
{{- if and (include "quire.publishesEvents" .) .values.kvEvents.curve.existingSecret }}
- name: event-keys
  mountPath: /etc/quire-events
  readOnly: true
{{- end }}
{{- end }}

{{- define "quire.eventKeysVolume" -}}
{{- if and (include "quire.publishesEvents" .) .values.kvEvents.curve.existingSecret }}
- name: event-keys
  secret:
    secretName: {{ .values.kvEvents.curve.existingSecret }}
    defaultMode: 0440
{{- end }}
{{- end }}

{{/*
Labels and annotations of an engine's pod by which routers recognize it, as JSON, from the parameters of quire.deployment.
Endpoint pickers read the metrics under vLLM's names. AIBrix takes a model's name that is no label from an annotation.
*/}}
{{- define "quire.routerMetadata" -}}
{{- $labels := dict }}
{{- $annotations := dict }}
{{- if include "quire.hasPodGateway" . }}
{{- $ports := include "quire.ports" .root | fromJson }}
{{- if .values.inferencePool.enabled }}
{{- $_ := set $labels "llm-d.ai/engine-type" "vllm" }}
{{- $_ := set $labels "inference.networking.k8s.io/engine-type" "vllm" }}
{{- end }}
{{- if .values.aibrix.enabled }}
{{- $isLabel := and (le (len .served) 63) (regexMatch "^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$" .served) }}
{{- $_ := set ($isLabel | ternary $labels $annotations) "model.aibrix.ai/name" .served }}
{{- $_ := set $labels "model.aibrix.ai/engine" "vllm" }}
{{- $_ := set $labels "model.aibrix.ai/port" (toString $ports.gateway.http) }}
{{- $_ := set $labels "model.aibrix.ai/metric-port" (toString $ports.engine.metrics) }}
{{- if .values.kvEvents.enabled }}
{{- $_ := set $labels "model.aibrix.ai/kv-events-enabled" "true" }}
{{- end }}
{{- end }}
{{- end }}
{{- toJson (dict "labels" $labels "annotations" $annotations) }}
{{- end }}

{{/* True if routers read metrics under vLLM's names, from a workload of quire.engines. */}}
{{- define "quire.metricsForRouters" -}}
{{- if or .values.inferencePool.enabled .values.aibrix.enabled }}true{{ end }}
{{- end }}

{{/* True if an engine of the release has something that routers of others reach without a gateway of the release. */}}
{{- define "quire.hasRouters" -}}
{{- range include "quire.engines" . | fromJsonArray }}
{{- if or .values.kvEvents.enabled (include "quire.metricsForRouters" .) (dig "smg" false .values.settings) }}true{{ end }}
{{- end }}
{{- end }}
