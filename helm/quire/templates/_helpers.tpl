{{/* The chart's name, for labels. */}}
{{- define "quire.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/*
The common part of all names. A Service's name begins with a letter and has no dots (DNS-1035); a release's name, of at
most 53 characters, may begin with a digit and have dots.
*/}}
{{- define "quire.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride }}
{{- $release := replace "." "-" .Release.Name }}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 53 | trimSuffix "-" }}
{{- else if not (regexMatch "^[a-z]" $release) }}
{{- include "quire.shortened" (dict "name" (printf "%s-%s" $name $release) "limit" 53) }}
{{- else if contains $name $release }}
{{- $release }}
{{- else }}
{{- printf "%s-%s" $release $name | trunc 53 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* `name` with at most `limit` characters. If some are cut off, a hash keeps different names different. */}}
{{- define "quire.shortened" -}}
{{- if le (len .name) (int .limit) }}
{{- .name }}
{{- else }}
{{- printf "%s-%s" (trunc (int (sub .limit 9)) .name | trimSuffix "-") (sha256sum .name | trunc 8) }}
{{- end }}
{{- end }}

{{/* The name of an object, from `root` and a suffix. Names of Services and Jobs have at most 63 characters. */}}
{{- define "quire.objectName" -}}
{{- include "quire.shortened" (dict "name" (printf "%s-%s" (include "quire.fullname" .root) .suffix) "limit" 63) }}
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

{{/* The image of all components. Without a tag it is the release's, with CUDA if an engine has a GPU. */}}
{{- define "quire.image" -}}
{{- $release := include "quire.onGPUs" . | empty | ternary $.Chart.AppVersion (printf "%s-cuda" $.Chart.AppVersion) }}
{{- with .Values.image }}
{{- if .digest }}
{{- printf "%s@%s" .repository .digest }}
{{- else }}
{{- printf "%s:%s" .repository (default $release .tag) }}
{{- end }}
{{- end }}
{{- end }}

{{/* True if an engine has a GPU. Its device may still be cpu: then it would be idle. */}}
{{- define "quire.onGPUs" -}}
{{- range include "quire.engines" . | fromJsonArray }}
{{- if or (eq (dig "device" "auto" .values.settings) "cuda") (include "quire.gpusOf" .values.resources | fromJson) }}true{{ end }}
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

{{/* The ports of each component, as JSON: the services' defaults (services/runtime/ports.py). */}}
{{- define "quire.ports" -}}
{{- $ports := .Files.Get "ports.json" | fromJson }}
{{- if not .Values.kvmanager.map.open }}
{{- $_ := unset $ports.kvmanager "map" }}
{{- end }}
{{- toJson (omit $ports "events") }}
{{- end }}

{{/* The gRPC port of a component, from `root` and `component`. */}}
{{- define "quire.port" -}}
{{- (get (include "quire.ports" .root | fromJson) .component).grpc | int }}
{{- end }}

{{/* The service names of readiness checks, as JSON. */}}
{{- define "quire.healthNames" -}}
{"kvmanager": "quire.v1.KVManager", "engine": "quire.v1.Engine", "gateway": "quire.v1.Gateway"}
{{- end }}

{{/*
The workloads of engines as a JSON list: one for `model`, or one for each of `models`. Each has `name` (of its
Deployment), `values` (of `engine`, with those of the model merged over them), `model`, `served` (the model's name for
clients), `entry` (its name in `models`, or empty), `labels` (which distinguish its pods) and `kvmanager` (the name of
its KV manager's Service).
*/}}
{{- define "quire.engines" -}}
{{- $engines := list }}
{{- range default (list dict) .Values.models }}
{{- $values := deepCopy $.Values.engine }}
{{- $_ := include "quire.overlay" (dict "base" $values "over" (omit . "name" "model")) }}
{{- $model := default $.Values.model .model }}
{{- $suffix := empty .name | ternary "" (printf "-%s" .name) }}
{{- $engines = append $engines (dict
  "name" (include "quire.engineName" (dict "root" $ "suffix" $suffix))
  "kvmanager" (include "quire.kvmanagerName" (dict "root" $ "suffix" $suffix))
  "entry" (default "" .name)
  "labels" (empty .name | ternary dict (dict "quire-model" .name))
  "model" $model
  "served" (default (base $model) $values.settings.model_name)
  "values" $values
) }}
{{- end }}
{{- toJson $engines }}
{{- end }}

{{/*
The name of an engine's workload. Kubernetes cuts the names of pods off after 46 characters of it, and autoscalers
recognize the pods by it. It is also within the bounds of a LeaderWorkerSet (50) and a ScaledObject (54).
*/}}
{{- define "quire.engineName" -}}
{{- include "quire.shortened" (dict "name" (printf "%s-engine%s" (include "quire.fullname" .root) .suffix) "limit" 46) }}
{{- end }}

{{/* The engines whose models `modelFetch` fetches, as in quire.engines: each model once, and no folders of the cache. */}}
{{- define "quire.fetchedModels" -}}
{{- $fetched := dict }}
{{- $engines := list }}
{{- range include "quire.engines" . | fromJsonArray }}
{{- if not (or (hasKey $fetched .model) (and (hasPrefix "/" .model) (not (hasSuffix ".gguf" .model)))) }}
{{- $_ := set $fetched .model true }}
{{- $engines = append $engines . }}
{{- end }}
{{- end }}
{{- toJson $engines }}
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

{{/*
Seconds of the drain of a pod, including the delay before it, from `root`, `component` and `values`: that of the service
that needs most.
*/}}
{{- define "quire.drainSeconds" -}}
{{- $drain := ceil .values.settings.grace_seconds }}
{{- range include "quire.sidecars" . | fromJsonArray }}
{{- $drain = max $drain (ceil .values.settings.grace_seconds) }}
{{- end }}
{{- add $drain (include "quire.preStopSeconds" . | int) }}
{{- end }}

{{/*
Seconds that a container continues before its drain, until load balancers no longer choose its pod. All containers of a
pod with a gateway of its own wait, because the gateway needs them.
*/}}
{{- define "quire.preStopSeconds" -}}
{{- if hasKey . "preStopSeconds" }}
{{- int .preStopSeconds }}
{{- else if include "quire.hasPodGateway" . }}
{{- int .root.Values.gateway.preStopSeconds }}
{{- else }}
{{- default 0 .values.preStopSeconds | int }}
{{- end }}
{{- end }}

{{/* The services beside the engine in its pod, as a JSON list of parameters like those of quire.deployment. */}}
{{- define "quire.sidecars" -}}
{{- $sidecars := list }}
{{- if include "quire.hasSidecar" . }}
{{- $sidecars = append $sidecars (include "quire.kvmanagerSidecar" . | fromJson) }}
{{- end }}
{{- if include "quire.hasPodGateway" . }}
{{- $sidecars = append $sidecars (include "quire.podGateway" . | fromJson) }}
{{- end }}
{{- toJson $sidecars }}
{{- end }}

{{/* What distinguishes the volumes of a service beside the engine from the engine's own. */}}
{{- define "quire.volumePrefix" -}}
{{- if .sidecar }}{{ .component }}-{{ end }}
{{- end }}

{{/* True if an autoscaler sets the number of pods, from a workload's `values`. */}}
{{- define "quire.autoscaled" -}}
{{- if or (dig "autoscaling" "hpa" "enabled" false .values) (dig "autoscaling" "keda" "enabled" false .values) }}true{{ end }}
{{- end }}

{{/* Minimum number of healthy pods, from a workload's `values`. */}}
{{- define "quire.leastReplicas" -}}
{{- if include "quire.autoscaled" . }}{{ int .values.autoscaling.minReplicas }}{{ else }}{{ int .values.replicas }}{{ end }}
{{- end }}
