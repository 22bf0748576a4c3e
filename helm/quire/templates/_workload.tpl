{{/*
The Deployment and the Service of one of the three services, made from what distinguishes it:

  root          the context of the chart
  component     kvmanager, engine or gateway: its key in values.yaml, its subcommand of `quire`, the end of its name
  health        the name under which its health service says whether it is ready
  grpcPort      where it is called
  metricsPort   where it is scraped
  httpPort      where it is called over HTTP, if it is
  settings      what the chart itself decides of its settings; the others come from values.yaml
  replicas      how many pods
  strategy      how they are replaced
  serviceType   type of its Service
  headless      whether its Service's name stands for the pods instead of an address of its own
  usesModel     whether it reads a model
*/}}
{{- define "quire.workload" -}}
{{- $root := .root }}
{{- $component := .component }}
{{- $values := get $root.Values $component }}
{{- $keys := dig "apiKeys" "existingSecret" "" $values }}
{{- $name := printf "%s-%s" (include "quire.fullname" $root) $component }}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ $name }}
  labels:
    {{- include "quire.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ $component }}
spec:
  replicas: {{ int .replicas }}
  strategy:
    type: {{ .strategy }}
  # Longer than a container may take to start, so that a rollout that still fetches a model has not failed.
  progressDeadlineSeconds: {{ add (mul 10 $values.startupFailureThreshold) 300 }}
  selector:
    matchLabels:
      {{- include "quire.selectorLabels" $root | nindent 6 }}
      app.kubernetes.io/component: {{ $component }}
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
        {{- with $values.podLabels }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
        {{- include "quire.selectorLabels" $root | nindent 8 }}
        app.kubernetes.io/component: {{ $component }}
    spec:
      automountServiceAccountToken: false
      # They would be variables such as QUIRE_ENGINE_PORT: names that belong to settings.
      enableServiceLinks: false
      {{- with $root.Values.imagePullSecrets }}
      imagePullSecrets:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      # Always above the time that the service takes to drain.
      terminationGracePeriodSeconds: {{ add (ceil $values.settings.grace_seconds) $root.Values.terminationMarginSeconds }}
      securityContext:
        runAsNonRoot: true
        runAsUser: 10001
        runAsGroup: 10001
        fsGroup: 10001
        # A cache full of models is not walked through at each start.
        fsGroupChangePolicy: OnRootMismatch
        seccompProfile:
          type: RuntimeDefault
      containers:
        - name: {{ $component }}
          image: {{ include "quire.image" $root | quote }}
          imagePullPolicy: {{ $root.Values.image.pullPolicy }}
          args: [{{ $component }}]
          env:
            - name: QUIRE_{{ upper $component }}_LISTEN
              value: 0.0.0.0:{{ .grpcPort }}
            - name: QUIRE_{{ upper $component }}_METRICS_LISTEN
              value: 0.0.0.0:{{ .metricsPort }}
            {{- with .httpPort }}
            - name: QUIRE_{{ upper $component }}_HTTP_LISTEN
              value: 0.0.0.0:{{ . }}
            {{- end }}
            {{- if eq $component "engine" }}
            # The KV manager tells engines apart by this.
            - name: QUIRE_ENGINE_ENGINE_ID
              valueFrom:
                fieldRef:
                  fieldPath: metadata.name
            {{- end }}
            {{- /* toJson, because Helm itself writes the number 1000000 as 1e+06. */}}
            {{- range $settings := list .settings $values.settings }}
            {{- range $setting, $value := $settings }}
            - name: QUIRE_{{ upper $component }}_{{ upper $setting }}
              value: {{ kindIs "string" $value | ternary $value (toJson $value) | quote }}
            {{- end }}
            {{- end }}
            {{- with $values.extraEnv }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
          ports:
            - name: grpc
              containerPort: {{ .grpcPort }}
            - name: metrics
              containerPort: {{ .metricsPort }}
            {{- with .httpPort }}
            - name: http
              containerPort: {{ . }}
            {{- end }}
          # Without a service's name the question is whether the process lives, whatever its neighbours do.
          startupProbe:
            grpc:
              port: {{ .grpcPort }}
            periodSeconds: 10
            timeoutSeconds: 3
            failureThreshold: {{ int $values.startupFailureThreshold }}
          livenessProbe:
            grpc:
              port: {{ .grpcPort }}
            periodSeconds: 10
            timeoutSeconds: 3
            failureThreshold: 3
          readinessProbe:
            grpc:
              port: {{ .grpcPort }}
              service: {{ .health }}
            periodSeconds: 5
            timeoutSeconds: 3
            failureThreshold: 3
          {{- with $values.resources }}
          resources:
            {{- toYaml . | nindent 12 }}
          {{- end }}
          securityContext:
            allowPrivilegeEscalation: false
            readOnlyRootFilesystem: {{ not $values.writableRootFilesystem }}
            capabilities:
              drop: [ALL]
          volumeMounts:
            - name: tmp
              mountPath: /tmp
            {{- if .usesModel }}
            - name: model-cache
              mountPath: /var/cache/quire
            {{- end }}
            {{- if $values.shmSize }}
            - name: shm
              mountPath: /dev/shm
            {{- end }}
            {{- if $values.pinnedPrompts }}
            - name: prompts
              mountPath: /etc/quire
              readOnly: true
            {{- end }}
            {{- if $keys }}
            - name: api-keys
              mountPath: /etc/quire-keys
              readOnly: true
            {{- end }}
      volumes:
        - name: tmp
          emptyDir: {}
        {{- if .usesModel }}
        - name: model-cache
          {{- if $root.Values.modelCache.persistence.enabled }}
          persistentVolumeClaim:
            claimName: {{ include "quire.modelCacheClaim" $root }}
          {{- else }}
          emptyDir:
            sizeLimit: {{ $root.Values.modelCache.size }}
          {{- end }}
        {{- end }}
        {{- with $values.shmSize }}
        - name: shm
          emptyDir:
            medium: Memory
            sizeLimit: {{ . }}
        {{- end }}
        {{- if $values.pinnedPrompts }}
        - name: prompts
          configMap:
            name: {{ include "quire.fullname" $root }}-prompts
        {{- end }}
        {{- with $keys }}
        # The gateway reads the file again when Kubernetes has updated it: no new pods for new keys.
        - name: api-keys
          secret:
            secretName: {{ . }}
            defaultMode: 0440
        {{- end }}
      {{- with $values.runtimeClassName }}
      runtimeClassName: {{ . }}
      {{- end }}
      {{- with $values.priorityClassName }}
      priorityClassName: {{ . }}
      {{- end }}
      {{- range $field := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" }}
      {{- with get $values $field }}
      {{ $field }}:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- end }}
---
apiVersion: v1
kind: Service
metadata:
  name: {{ $name }}
  labels:
    {{- include "quire.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ $component }}
spec:
  type: {{ .serviceType }}
  {{- if .headless }}
  # Its name stands for the addresses of all pods that are ready: gateways choose among them.
  clusterIP: None
  {{- end }}
  selector:
    {{- include "quire.selectorLabels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ $component }}
  ports:
    - name: grpc
      port: {{ .grpcPort }}
      targetPort: grpc
    - name: metrics
      port: {{ .metricsPort }}
      targetPort: metrics
    {{- with .httpPort }}
    - name: http
      port: {{ . }}
      targetPort: http
    {{- end }}
{{- end }}
