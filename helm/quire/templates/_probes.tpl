{{/*
The action of a probe, from `root`, `component` and `health`: the name of the service for readiness, or empty for the
liveness of the process alone. Kubernetes' gRPC probes have no TLS, so with TLS the probe runs a command. It trusts the
service's own certificate file, for any authority.
*/}}
{{- define "quire.probe" -}}
{{- $port := (get (include "quire.ports" .root | fromJson) .component).grpc }}
{{- if .root.Values.tls.enabled }}
{{- $folder := include "quire.tlsFolder" . }}
exec:
  command:
    - quire
    - health
    - 127.0.0.1:{{ $port }}
    - --service={{ .health }}
    - --timeout=8
    - --ca={{ $folder }}/tls.crt
    - --server-name={{ include "quire.tlsListeningName" . }}
    {{- if include "quire.tlsIsMutual" . }}
    - --certificate={{ $folder }}/tls.crt
    - --private-key={{ $folder }}/tls.key
    {{- end }}
timeoutSeconds: 10
{{- else }}
grpc:
  port: {{ $port }}
  {{- with .health }}
  service: {{ . }}
  {{- end }}
timeoutSeconds: 3
{{- end }}
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
  periodSeconds: {{ .root.Values.tls.enabled | ternary 10 5 }}
  failureThreshold: 3
{{- end }}
