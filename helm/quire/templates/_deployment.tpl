{{/*
The Deployment of a component, or the LeaderWorkerSet of an engine whose ranks are in several pods, from its parameters:

  root        the context of the chart
  component   kvmanager, engine or gateway: its key in values.yaml, its subcommand of `quire`
  name        of the Deployment or LeaderWorkerSet
  values      of the component
  settings    what the chart itself decides of its settings; the others come from its values
  otherRank   true in the pods without rank 0, which serve nothing
  sidecar     true for a service beside the engine in its pod
  portPrefix  of the names of such a service's ports
  labels      additional labels that distinguish its pods from those of other models
  strategy    how pods are replaced
*/}}
{{- define "quire.deployment" -}}
{{- $component := .component }}
{{- $values := .values }}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ .name }}
  labels:
    {{- include "quire.labels" .root | nindent 4 }}
    app.kubernetes.io/component: {{ $component }}
    {{- with .labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- if not (include "quire.autoscaled" .) }}
  replicas: {{ int (default 1 $values.replicas) }}
  {{- end }}
  revisionHistoryLimit: {{ int .root.Values.revisionHistoryLimit }}
  strategy:
    {{- toYaml .strategy | nindent 4 }}
  # Longer than the startup probe allows, so that a rollout does not fail while it fetches a model.
  progressDeadlineSeconds: {{ add (mul 10 $values.startupFailureThreshold) 300 }}
  selector:
    matchLabels:
      {{- include "quire.componentLabels" . | nindent 6 }}
      {{- with .labels }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
  template:
    {{- include "quire.podTemplate" . | trim | nindent 4 }}
{{- end }}

{{/* The pod template, from the same parameters. */}}
{{- define "quire.podTemplate" -}}
{{- $values := .values }}
metadata:
  {{- $routers := include "quire.routerMetadata" . | fromJson }}
  {{- $annotations := deepCopy $values.podAnnotations }}
  {{- $_ := include "quire.overlay" (dict "base" $annotations "over" $routers.annotations) }}
  {{- if or $annotations $values.pinnedPrompts }}
  annotations:
    {{- with $annotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- with $values.pinnedPrompts }}
    # A pod reads the file when it starts, so changed prompts need new pods.
    checksum/pinned-prompts: {{ toJson . | sha256sum }}
    {{- end }}
  {{- end }}
  labels:
    {{- $labels := deepCopy $values.podLabels }}
    {{- $_ := include "quire.overlay" (dict "base" $labels "over" $routers.labels) }}
    {{- $_ := include "quire.overlay" (dict "base" $labels "over" (include "quire.podLabels" . | fromYaml)) }}
    {{- $_ := include "quire.overlay" (dict "base" $labels "over" .labels) }}
    {{- toYaml $labels | nindent 4 }}
spec:
  {{- include "quire.podSpec" . | trim | nindent 2 }}
{{- end }}

{{/* The pod's spec, from the same parameters. */}}
{{- define "quire.podSpec" -}}
{{- $root := .root }}
{{- $values := .values }}
serviceAccountName: {{ include "quire.serviceAccountName" . }}
{{- include "quire.podDefaults" . }}
terminationGracePeriodSeconds: {{ include "quire.terminationSeconds" . }}
{{- with $values.initContainers }}
initContainers:
  {{- toYaml . | nindent 2 }}
{{- end }}
containers:
  - name: {{ .component }}
    {{- include "quire.container" . | trim | nindent 4 }}
  {{- range include "quire.sidecars" . | fromJsonArray }}
  - name: {{ .component }}
    {{- include "quire.container" (merge (dict "root" $root) .) | trim | nindent 4 }}
  {{- end }}
  {{- with $values.extraContainers }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
volumes:
  {{- include "quire.volumes" . | trim | nindent 2 }}
{{- with $values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- range $field := list "nodeSelector" "tolerations" }}
{{- with get $values $field }}
{{ $field }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- with include "quire.affinity" . | fromYaml }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with include "quire.spread" . | fromYamlArray }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* The affinity of pods, with that between gateways of the release unless the values have another one. */}}
{{- define "quire.affinity" -}}
{{- $affinity := deepCopy .values.affinity }}
{{- $wanted := default "none" .values.antiAffinity }}
{{- if and (ne $wanted "none") (not (hasKey $affinity "podAntiAffinity")) }}
{{- $selector := dict "matchLabels" (include "quire.componentLabels" . | fromYaml) }}
{{- $term := dict "topologyKey" "kubernetes.io/hostname" "labelSelector" $selector }}
{{- if eq $wanted "required" }}
{{- $_ := set $affinity "podAntiAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (list $term)) }}
{{- else }}
{{- $preferred := list (dict "weight" 100 "podAffinityTerm" $term) }}
{{- $_ := set $affinity "podAntiAffinity" (dict "preferredDuringSchedulingIgnoredDuringExecution" $preferred) }}
{{- end }}
{{- end }}
{{- toYaml $affinity }}
{{- end }}

{{/* The spread of pods. A constraint without a selector counts the pods of the same workload. */}}
{{- define "quire.spread" -}}
{{- $constraints := list }}
{{- range deepCopy .values.topologySpreadConstraints }}
{{- if not (hasKey . "labelSelector") }}
{{- $labels := merge (dict) (include "quire.podLabels" $ | fromYaml) (default dict $.labels) }}
{{- $_ := set . "labelSelector" (dict "matchLabels" $labels) }}
{{- end }}
{{- $constraints = append $constraints . }}
{{- end }}
{{- toYaml $constraints }}
{{- end }}

{{/* The common part of all pod specs, from `root`. */}}
{{- define "quire.podDefaults" }}
automountServiceAccountToken: false
# Service links would set variables such as QUIRE_ENGINE_PORT, which are names of settings.
enableServiceLinks: false
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
{{- end }}

{{- define "quire.container" -}}
{{- $root := .root }}
{{- $component := .component }}
{{- $values := .values }}
{{- $pods := dig "ranks" "pods" 1 $values | int }}
image: {{ include "quire.image" $root | quote }}
imagePullPolicy: {{ $root.Values.image.pullPolicy }}
{{- if gt $pods 1 }}
# It starts the ranks of this pod, which meet at the first pod of the group.
command: [torchrun]
args:
  - --nnodes={{ $pods }}
  - --nproc-per-node={{ div (dig "tensor_parallel" 1 $values.settings) $pods }}
  - --node-rank=$(LWS_WORKER_INDEX)
  - --master-addr=$(LWS_LEADER_ADDRESS)
  - --master-port={{ int $values.ranks.port }}
  - --no-python
  - quire
{{- else }}
args:
{{- end }}
  - {{ $component }}
  {{- with $values.extraArgs }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
env:
  {{- if eq $component "engine" }}
  # The KV manager identifies engines by it: unique for each pod, and unchanged when its container restarts.
  - name: QUIRE_ENGINE_ENGINE_ID
    valueFrom:
      fieldRef:
        fieldPath: metadata.name
  {{- end }}
  {{- /* toJson, because Helm itself writes the number 1000000 as 1e+06. */}}
  {{- $events := include "quire.eventSettings" . | fromJson }}
  {{- range $settings := list (include "quire.listening" . | fromJson) .settings $events (include "quire.tlsSettings" . | fromJson) $values.settings }}
  {{- range $setting, $value := $settings }}
  - name: QUIRE_{{ upper $component }}_{{ upper $setting }}
    value: {{ kindIs "string" $value | ternary $value (toJson $value) | quote }}
  {{- end }}
  {{- end }}
  {{- with $values.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with $values.extraEnvFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if not .otherRank }}
ports:
  {{- range $name, $port := get (include "quire.ports" $root | fromJson) $component }}
  - name: {{ $.portPrefix }}{{ $name }}
    containerPort: {{ $port }}
  {{- end }}
  {{- range $name, $port := include "quire.eventPorts" . | fromJson }}
  - name: {{ $name }}
    containerPort: {{ $port }}
  {{- end }}
{{ include "quire.probes" . | trim }}
{{- end }}
{{- with include "quire.preStopSeconds" . | int }}
# The pod serves until load balancers have removed it, which takes a while after its deletion.
lifecycle:
  preStop:
    {{- if semverCompare ">=1.30-0" $root.Capabilities.KubeVersion.Version }}
    sleep:
      seconds: {{ int . }}
    {{- else }}
    exec:
      command: [sleep, {{ int . | quote }}]
    {{- end }}
{{- end }}
{{- with $values.resources }}
resources:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- $security := deepCopy $root.Values.securityContext }}
{{- if $values.writableRootFilesystem }}
{{- $_ := set $security "readOnlyRootFilesystem" false }}
{{- end }}
securityContext:
  {{- toYaml $security | nindent 2 }}
volumeMounts:
  - name: {{ include "quire.volumePrefix" . }}tmp
    mountPath: /tmp
  {{- if eq $component "engine" }}
  - name: model-cache
    mountPath: /var/cache/quire
  - name: shm
    mountPath: /dev/shm
  {{- end }}
  {{- if dig "keepBlocks" "enabled" false $values }}
  - name: kept-blocks
    mountPath: /var/lib/quire/kept-blocks
  {{- end }}
  {{- if $values.pinnedPrompts }}
  - name: prompts
    mountPath: /etc/quire
    readOnly: true
  {{- end }}
  {{- if dig "apiKeys" "existingSecret" "" $values }}
  - name: api-keys
    mountPath: /etc/quire-keys
    readOnly: true
  {{- end }}
  {{- with include "quire.eventKeysMount" . | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- with include "quire.tlsVolumeMounts" . | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- with $values.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{/* The listen addresses of a component, as settings in JSON. */}}
{{- define "quire.listening" -}}
{{- $ports := get (include "quire.ports" .root | fromJson) .component }}
{{- $settings := dict "listen" (printf "0.0.0.0:%v" $ports.grpc) }}
{{- range $name, $port := omit $ports "grpc" }}
{{- $_ := set $settings (printf "%s_listen" $name) (printf "0.0.0.0:%v" $port) }}
{{- end }}
{{- toJson $settings }}
{{- end }}

{{- define "quire.volumes" -}}
{{- $root := .root }}
{{- $values := .values }}
- name: {{ include "quire.volumePrefix" . }}tmp
  emptyDir: {}
{{- if eq .component "engine" }}
- name: model-cache
  {{- if $root.Values.modelCache.persistence.enabled }}
  persistentVolumeClaim:
    claimName: {{ include "quire.modelCacheClaim" $root }}
  {{- else }}
  emptyDir:
    sizeLimit: {{ $root.Values.modelCache.size }}
  {{- end }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ $values.shmSize }}
{{- end }}
{{- if dig "keepBlocks" "enabled" false $values }}
# It lives as long as the pod, whatever happens to the container.
- name: kept-blocks
  emptyDir:
    medium: Memory
    {{- with $values.keepBlocks.sizeLimit }}
    sizeLimit: {{ . }}
    {{- end }}
{{- end }}
{{- if $values.pinnedPrompts }}
- name: prompts
  configMap:
    name: {{ include "quire.fullname" $root }}-prompts
{{- end }}
{{- with dig "apiKeys" "existingSecret" "" $values }}
# The gateway reads an updated file again, so new keys need no new pods.
- name: api-keys
  secret:
    secretName: {{ . }}
    defaultMode: 0440
{{- end }}
{{- with include "quire.eventKeysVolume" . | trim }}
{{ . }}
{{- end }}
{{- with include "quire.tlsVolumes" . | trim }}
{{ . }}
{{- end }}
{{- with $values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- range include "quire.sidecars" . | fromJsonArray }}
{{ include "quire.volumes" (merge (dict "root" $root) .) | trim }}
{{- end }}
{{- end }}
