{{/* Values for routers of others that would expose prompts, or with which a router would see nothing. */}}
{{- define "quire.routerFaults" -}}
{{- $open := or .Values.gateway.apiKeys.existingSecret .Values.gateway.insecure }}
{{- range include "quire.engines" . | fromJsonArray }}
{{- $key := include "quire.engineKey" . }}
{{- if and .values.inferencePool.enabled (not $open) }}
{{ $key }}.inferencePool is enabled, which opens the gateways in the pods beyond the cluster without API keys: set gateway.apiKeys.existingSecret, or gateway.insecure
{{- end }}
{{- if and (include "quire.metricsForRouters" .) (eq (dig "metrics_compat" "vllm" .values.settings) "none") }}
{{ $key }}.settings.metrics_compat is none, but {{ $key }}.{{ .values.inferencePool.enabled | ternary "inferencePool" "aibrix" }} is enabled: routers read the metrics under vLLM's names
{{- end }}
{{- if and .values.podGateway.resources (not (include "quire.hasPodGateway" (dict "component" "engine" "values" .values))) }}
{{ $key }}.podGateway.resources are set, but no pod has a gateway: set {{ $key }}.podGateway.enabled
{{- end }}
{{- include "quire.eventFaults" (dict "root" $ "key" $key "values" .values) }}
{{- end }}
{{- if and .Values.networkPolicy.enabled (include "quire.hasRouters" .) (not .Values.networkPolicy.routers) }}
networkPolicy is enabled, but networkPolicy.routers is empty: no router would reach the metrics, events or requests of the engines that it chooses from
{{- end }}
{{- end }}

{{- define "quire.eventFaults" -}}
{{- $key := printf "%s.kvEvents" .key }}
{{- $smg := include "quire.smgInPlainText" . }}
{{- with .values.kvEvents }}
{{- if and .enabled (not .curve.existingSecret) (not .insecure) }}
{{ $key }} is enabled, and whoever reaches a pod would read the token ids of prompts: set {{ $key }}.curve.existingSecret, or {{ $key }}.insecure
{{- else if and .enabled .curve.existingSecret .insecure (not $smg) }}
{{ $key }} has both curve.existingSecret and insecure: events are encrypted, or not
{{- else if and .curve.existingSecret (not .enabled) }}
{{ $key }}.curve.existingSecret is set, but {{ $key }} is not enabled: nothing would be published
{{- end }}
{{- end }}
{{- if and $smg (not .values.kvEvents.insecure) (or .values.kvEvents.curve.existingSecret (not .values.kvEvents.enabled)) }}
{{ .key }}.settings.smg is true, and whoever reaches the gRPC port of a pod would read the token ids of prompts: set tls.enabled, or {{ $key }}.insecure
{{- end }}
{{- if and .values.aibrix.enabled .values.kvEvents.enabled .values.kvEvents.curve.existingSecret }}
{{ $key }}.curve.existingSecret is set, but {{ .key }}.aibrix is enabled, which speaks no CURVE: set {{ $key }}.insecure, and let networkPolicy decide who reaches the events
{{- end }}
{{- if and .values.aibrix.enabled .values.kvEvents.enabled (eq (dig "kv_events_form" "array" .values.settings) "map") }}
{{ .key }}.settings.kv_events_form is map, but {{ .key }}.aibrix is enabled, which reads arrays
{{- end }}
{{- end }}
