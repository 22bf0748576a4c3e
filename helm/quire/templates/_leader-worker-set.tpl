{{/*
The LeaderWorkerSet of an engine whose ranks are in several pods, from the parameters of quire.deployment. A group of
pods is one engine: its first pod has rank 0, and all pods are replaced together.
*/}}
{{- define "quire.leaderWorkerSet" -}}
{{- $values := .values }}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
metadata:
  name: {{ .name }}
  labels:
    {{- include "quire.labels" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
    {{- with .labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- if not (include "quire.autoscaled" .) }}
  replicas: {{ int (default 1 $values.replicas) }}
  {{- end }}
  startupPolicy: LeaderCreated
  rolloutStrategy:
    type: RollingUpdate
    rollingUpdateConfiguration:
      {{- toYaml $values.rollingUpdate | nindent 6 }}
  leaderWorkerTemplate:
    size: {{ int $values.ranks.pods }}
    # If a rank ends, all ranks end.
    restartPolicy: RecreateGroupOnPodRestart
    leaderTemplate:
      {{- include "quire.podTemplate" . | trim | nindent 6 }}
    workerTemplate:
      {{- include "quire.podTemplate" (merge (dict "otherRank" true) .) | trim | nindent 6 }}
{{- end }}

{{/* The labels of a pod: those of its component, but pods without rank 0 are in no Service of the engines. */}}
{{- define "quire.podLabels" -}}
{{- if .otherRank }}
{{- include "quire.componentLabels" (dict "root" .root "component" "engine-rank") }}
{{- else }}
{{- include "quire.componentLabels" . }}
{{- end }}
{{- end }}
