{{/*
Where KV managers run (`kvmanager.placement`). shared: a Deployment for all engines. model: a Deployment for the engines of
each model. engine: a container in the pod of each engine.
*/}}

{{/* The name of the KV manager's Service, and of its Deployment, for the engines whose names end with `suffix`. */}}
{{- define "quire.kvmanagerName" -}}
{{- $ofModel := eq .root.Values.kvmanager.placement "model" }}
{{- include "quire.objectName" (dict "root" .root "suffix" (printf "kvmanager%s" ($ofModel | ternary .suffix ""))) }}
{{- end }}

{{/* The Deployments of KV managers as a JSON list, each with `name` and `labels` (which distinguish its pods). */}}
{{- define "quire.kvmanagers" -}}
{{- $managers := list }}
{{- if eq .Values.kvmanager.placement "shared" }}
{{- $managers = append $managers (dict "name" (include "quire.kvmanagerName" (dict "root" .)) "labels" dict) }}
{{- else if eq .Values.kvmanager.placement "model" }}
{{- range include "quire.engines" . | fromJsonArray }}
{{- $managers = append $managers (dict "name" .kvmanager "labels" .labels) }}
{{- end }}
{{- end }}
{{- toJson $managers }}
{{- end }}

{{/* The address at which an engine reaches its KV manager, from `root` and `engine`. */}}
{{- define "quire.kvmanagerAddress" -}}
{{- eq .root.Values.kvmanager.placement "engine" | ternary "127.0.0.1" .engine.kvmanager }}:{{ include "quire.port" (dict "root" .root "component" "kvmanager") }}
{{- end }}

{{/* The KV managers of a gateway. */}}
{{- define "quire.kvmanagerAddresses" -}}
{{- $addresses := list }}
{{- $port := include "quire.port" (dict "root" . "component" "kvmanager") }}
{{- range include "quire.kvmanagers" . | fromJsonArray }}
{{- $addresses = append $addresses (printf "%s:%s" .name $port) }}
{{- end }}
{{- if $addresses }}
{{- join "," $addresses }}
{{- else }}
{{- printf "dns:%s:%s" (include "quire.kvmanagerName" (dict "root" .)) $port }}
{{- end }}
{{- end }}

{{/* True for pods with a KV manager beside the engine, from the parameters of quire.deployment. */}}
{{- define "quire.hasSidecar" -}}
{{- if and (eq .component "engine") (eq .root.Values.kvmanager.placement "engine") (not .otherRank) }}true{{ end }}
{{- end }}

{{/* The parameters of the KV manager's container beside the engine, as those of quire.deployment, from `root`. */}}
{{- define "quire.kvmanagerSidecar" -}}
{{- toJson (dict
  "component" "kvmanager"
  "values" .root.Values.kvmanager
  "settings" (include "quire.kvmanagerSettings" .root | fromJson)
  "sidecar" true
  "portPrefix" "kv-"
  "preStopSeconds" (include "quire.preStopSeconds" . | int)
) }}
{{- end }}

{{- define "quire.kvmanagerSettings" -}}
{{- .Values.tls.enabled | ternary dict (dict "insecure" true) | toJson }}
{{- end }}

{{/*
Tolerations of the pods: a new one starts elsewhere soon after the node is lost. Kubernetes applies the first one that
matches, so one of the values for the same taint takes the place of the chart's.
*/}}
{{- define "quire.kvmanagerTolerations" -}}
{{- $own := include "quire.lostNodeTolerations" . | fromJsonArray }}
{{- range $key := list "node.kubernetes.io/not-ready" "node.kubernetes.io/unreachable" }}
{{- $given := false }}
{{- range $own }}
{{- $given = or $given (eq .key $key) }}
{{- end }}
{{- if not $given }}
- key: {{ $key }}
  operator: Exists
  effect: NoExecute
  tolerationSeconds: {{ int $.Values.kvmanager.lostNodeSeconds }}
{{- end }}
{{- end }}
{{- with .Values.kvmanager.tolerations }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* The tolerations of the values that keep a KV manager on a lost node, as a JSON list. */}}
{{- define "quire.lostNodeTolerations" -}}
{{- $found := list }}
{{- range .Values.kvmanager.tolerations }}
{{- $onLoss := has .key (list "node.kubernetes.io/not-ready" "node.kubernetes.io/unreachable") }}
{{- if and $onLoss (has (default "" .effect) (list "" "NoExecute")) }}
{{- $found = append $found . }}
{{- end }}
{{- end }}
{{- toJson $found }}
{{- end }}

{{/* The name of the PriorityClass that the chart creates. It is the cluster's, so it includes the namespace. */}}
{{- define "quire.kvmanagerPriorityClass" -}}
{{- printf "%s-%s-kvmanager" .Release.Namespace (include "quire.fullname" .) }}
{{- end }}
