{{/*
The Deployment of a component, made from what distinguishes it:

  root        the context of the chart
  component   kvmanager, engine or gateway: its key in values.yaml, its subcommand of `quire`
  name        of the Deployment
  values      of the component
  settings    what the chart itself decides of its settings; the others come from its values
  labels      more labels of its pods, by which they differ from those of other Deployments
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
  strategy:
    {{- toYaml .strategy | nindent 4 }}
  # Longer than a container may take to start, so that a rollout that still fetches a model has not failed.
  progressDeadlineSeconds: {{ add (mul 10 $values.startupFailureThreshold) 300 }}
  selector:
    matchLabels:
      {{- include "quire.componentLabels" . | nindent 6 }}
      {{- with .labels }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
  template:
    metadata:
      {{- if or $values.podAnnotations $values.pinnedPrompts }}
      annotations:
        {{- with $values.podAnnotations }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
        {{- with $values.pinnedPrompts }}
        # A pod reads the file when it starts: other prompts, other pods.
        checksum/pinned-prompts: {{ toJson . | sha256sum }}
        {{- end }}
      {{- end }}
      labels:
        {{- $labels := deepCopy $values.podLabels }}
        {{- $_ := include "quire.overlay" (dict "base" $labels "over" (include "quire.componentLabels" . | fromYaml)) }}
        {{- $_ := include "quire.overlay" (dict "base" $labels "over" .labels) }}
        {{- toYaml $labels | nindent 8 }}
    spec:
      {{- include "quire.podSpec" . | trim | nindent 6 }}
{{- end }}

{{/* What a pod is, of the same. */}}
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
{{- range $field := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" }}
{{- with get $values $field }}
{{ $field }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}

{{/* What all pods of the chart have in common, of `root`. */}}
{{- define "quire.podDefaults" }}
automountServiceAccountToken: false
# They would be variables such as QUIRE_ENGINE_PORT: names that belong to settings.
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
image: {{ include "quire.image" $root | quote }}
imagePullPolicy: {{ $root.Values.image.pullPolicy }}
args:
  - {{ $component }}
  {{- with $values.extraArgs }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
env:
  {{- if eq $component "engine" }}
  # The KV manager tells engines apart by this: one name for each pod, which stays when its container is restarted.
  - name: QUIRE_ENGINE_ENGINE_ID
    valueFrom:
      fieldRef:
        fieldPath: metadata.name
  {{- end }}
  {{- /* toJson, because Helm itself writes the number 1000000 as 1e+06. */}}
  {{- range $settings := list (include "quire.listening" . | fromJson) .settings (include "quire.tlsSettings" . | fromJson) $values.settings }}
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
ports:
  {{- range $name, $port := get (include "quire.ports" $root | fromJson) $component }}
  - name: {{ $name }}
    containerPort: {{ $port }}
  {{- end }}
{{ include "quire.probes" . | trim }}
{{- with $values.preStopSeconds }}
# Nobody learns at once that the pod is ending: until the balancers have, it answers as before.
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
  - name: tmp
    mountPath: /tmp
  {{- if eq $component "engine" }}
  - name: model-cache
    mountPath: /var/cache/quire
  - name: shm
    mountPath: /dev/shm
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
  {{- with include "quire.tlsVolumeMounts" . | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- with $values.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{/* Where a component listens, as settings in JSON. */}}
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
- name: tmp
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
{{- if $values.pinnedPrompts }}
- name: prompts
  configMap:
    name: {{ include "quire.fullname" $root }}-prompts
{{- end }}
{{- with dig "apiKeys" "existingSecret" "" $values }}
# The gateway reads the file again when Kubernetes has updated it: no new pods for new keys.
- name: api-keys
  secret:
    secretName: {{ . }}
    defaultMode: 0440
{{- end }}
{{- with include "quire.tlsVolumes" . | trim }}
{{ . }}
{{- end }}
{{- with $values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}
