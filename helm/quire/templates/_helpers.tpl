{{/* The chart's name, for labels. */}}
{{- define "quire.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/*
The common part of all names. Names have at most 63 characters, and "-kvmanager" is appended; names of releases have at
most 53.
*/}}
{{- define "quire.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride }}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 53 | trimSuffix "-" }}
{{- else if contains $name .Release.Name }}
{{- .Release.Name }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 53 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* Labels of every object. */}}
{{- define "quire.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: quire
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "quire.selectorLabels" . }}
{{- end }}

{{/* Labels that select all pods of the release. */}}
{{- define "quire.selectorLabels" -}}
app.kubernetes.io/name: {{ include "quire.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* Labels that select the pods of one component, from `root` and `component`. */}}
{{- define "quire.componentLabels" -}}
{{ include "quire.selectorLabels" .root }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "quire.image" -}}
{{- with .Values.image }}
{{- if .digest }}
{{- printf "%s@%s" .repository .digest }}
{{- else }}
{{- printf "%s:%s" .repository (default $.Chart.AppVersion .tag) }}
{{- end }}
{{- end }}
{{- end }}

{{/* The name of the model cache's claim. */}}
{{- define "quire.modelCacheClaim" -}}
{{- default (printf "%s-models" (include "quire.fullname" .)) .Values.modelCache.persistence.existingClaim }}
{{- end }}

{{/* The service account of a component, from `root` and `component`. */}}
{{- define "quire.serviceAccountName" -}}
{{- $account := (get .root.Values .component).serviceAccount }}
{{- if $account.create }}
{{- default (printf "%s-%s" (include "quire.fullname" .root) .component) $account.name }}
{{- else }}
{{- default "default" $account.name }}
{{- end }}
{{- end }}

{{/* The ports of each component, as JSON. */}}
{{- define "quire.ports" -}}
{
  "kvmanager": {"grpc": 50053, {{ if .Values.kvmanager.map.open }}"map": 8053, {{ end }}"metrics": 9153},
  "engine": {"grpc": 50052, "metrics": 9152},
  "gateway": {"grpc": 50051, "http": 8000, "metrics": 9151}
}
{{- end }}

{{/* The service names of readiness checks, as JSON. */}}
{{- define "quire.healthNames" -}}
{"kvmanager": "quire.v1.KVManager", "engine": "quire.v1.Engine", "gateway": "quire.v1.Gateway"}
{{- end }}

{{/*
The workloads of engines as a JSON list: one for `model`, or one for each of `models`. Each has `name` (of its
Deployment), `values` (of `engine`, with those of the model merged over them), `model`, `served` (the model's name for
clients), `entry` (its name in `models`, or empty) and `labels` (which distinguish its pods).
*/}}
{{- define "quire.engines" -}}
{{- $engines := list }}
{{- range default (list dict) .Values.models }}
{{- $values := deepCopy $.Values.engine }}
{{- $_ := include "quire.overlay" (dict "base" $values "over" (omit . "name" "model")) }}
{{- $model := default $.Values.model .model }}
{{- $engines = append $engines (dict
  "name" (include "quire.engineName" (dict "root" $ "entry" (default "" .name)))
  "entry" (default "" .name)
  "labels" (empty .name | ternary dict (dict "quire-model" .name))
  "model" $model
  "served" (default (base $model) $values.settings.model_name)
  "values" $values
) }}
{{- end }}
{{- toJson $engines }}
{{- end }}

{{- define "quire.engineName" -}}
{{- $fullname := include "quire.fullname" .root }}
{{- if .entry }}
{{- printf "%s-engine-%s" ($fullname | trunc (int (sub 55 (len .entry))) | trimSuffix "-") .entry }}
{{- else }}
{{- printf "%s-engine" $fullname }}
{{- end }}
{{- end }}

{{/* Merges `over` into `base`, in place. Sprig's own merges skip zero, false and empty strings. */}}
{{- define "quire.overlay" -}}
{{- range $key, $value := .over }}
{{- $below := get $.base $key }}
{{- if and (kindIs "map" $value) (kindIs "map" $below) }}
{{- $_ := include "quire.overlay" (dict "base" $below "over" $value) }}
{{- else }}
{{- $_ := set $.base $key $value }}
{{- end }}
{{- end }}
{{- end }}

{{/* Termination grace period in seconds, from a component's `values` and `root`. */}}
{{- define "quire.terminationSeconds" -}}
{{- if .values.terminationGracePeriodSeconds }}
{{- int .values.terminationGracePeriodSeconds }}
{{- else }}
{{- add (include "quire.drainSeconds" .) .root.Values.terminationMarginSeconds }}
{{- end }}
{{- end }}

{{/* Seconds of a component's drain, including the delay before it. */}}
{{- define "quire.drainSeconds" -}}
{{- add (ceil .values.settings.grace_seconds) (default 0 .values.preStopSeconds) }}
{{- end }}

{{/* True if an autoscaler sets the number of pods, from a workload's `values`. */}}
{{- define "quire.autoscaled" -}}
{{- if or (dig "autoscaling" "hpa" "enabled" false .values) (dig "autoscaling" "keda" "enabled" false .values) }}true{{ end }}
{{- end }}

{{/* Minimum number of healthy pods, from a workload's `values`. */}}
{{- define "quire.leastReplicas" -}}
{{- if include "quire.autoscaled" . }}{{ int .values.autoscaling.minReplicas }}{{ else }}{{ int .values.replicas }}{{ end }}
{{- end }}
