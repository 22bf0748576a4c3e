{{/*
The action of a probe, from `root`, `component` and `health`: the name of the service for readiness, or empty for the
liveness of the process alone. Kubernetes' gRPC probes have no TLS, so with TLS the metrics listener answers, which has
none and is served by the same event loop.
*/}}
{{- define "quire.probe" -}}
{{- $ports := get (include "quire.ports" .root | fromJson) .component }}
{{- if .root.Values.tls.enabled }}
httpGet:
  path: {{ empty .health | ternary "/live" "/ready" }}
  port: {{ $ports.metrics }}
{{- else }}
grpc:
  port: {{ $ports.grpc }}
  {{- with .health }}
  service: {{ . }}
  {{- end }}
{{- end }}
timeoutSeconds: 3
{{- end }}

{{/* All probes of a component, from `root`, `component` and its `values`. */}}
{{- define "quire.probes" -}}
{{- $lives := include "quire.probe" (dict "root" .root "component" .component "health" "") }}
{{- $health := get (include "quire.healthNames" . | fromJson) .component }}
startupProbe:
  {{- $lives | trim | nindent 2 }}
  periodSeconds: 10
  failureThreshold: {{ int .values.startupFailureThreshold }}
livenessProbe:
  {{- $lives | trim | nindent 2 }}
  periodSeconds: 10
  failureThreshold: 3
readinessProbe:
  {{- include "quire.probe" (dict "root" .root "component" .component "health" $health) | trim | nindent 2 }}
  periodSeconds: 5
  failureThreshold: 3
{{- end }}
