{{/*
Inconsistent values, one line for each; values.schema.json checks each value alone. Any line fails the rendering, because
a refused install is better than one that blocks, or that loses requests in a drain.
*/}}
{{- define "quire.faults" -}}
{{ include "quire.drainFaults" . }}
{{ include "quire.replicaFaults" . }}
{{ include "quire.modelFaults" . }}
{{ include "quire.claimFaults" . }}
{{ include "quire.rankFaults" . }}
{{ include "quire.resourceFaults" . }}
{{ include "quire.settingFaults" . }}
{{ include "quire.variableFaults" . }}
{{ include "quire.tlsFaults" . }}
{{ include "quire.exposureFaults" . }}
{{ include "quire.kvmanagerFaults" . }}
{{ include "quire.routeFaults" . }}
{{ include "quire.fetchFaults" . }}
{{ include "quire.routerFaults" . }}
{{- end }}

{{- define "quire.drainFaults" -}}
{{- $engines := include "quire.engines" . | fromJsonArray }}
{{- range $one := concat $engines (list (dict "key" "kvmanager" "values" .Values.kvmanager) (dict "key" "gateway" "values" .Values.gateway)) }}
{{- $key := default (include "quire.engineKey" .) .key }}
{{- $component := dict "root" $ "component" (default "engine" .key) "values" .values }}
{{- $needed := include "quire.drainSeconds" $component | int }}
{{- with int .values.terminationGracePeriodSeconds }}
{{- if le . $needed }}
{{ $key }}.terminationGracePeriodSeconds is {{ . }}, but the pod drains for {{ $needed }} s ({{ if include "quire.hasSidecar" $component }}kvmanager.{{ end }}settings.grace_seconds{{ if include "quire.preStopSeconds" $component | int }} and preStopSeconds{{ end }}): Kubernetes would kill it before its end
{{- end }}
{{- end }}
{{- end }}
{{- range $engines }}
{{- if ge (float64 .values.settings.grace_seconds) (float64 $.Values.kvmanager.settings.grace_seconds) }}
kvmanager.settings.grace_seconds is {{ $.Values.kvmanager.settings.grace_seconds }}, but {{ include "quire.engineKey" . }}.settings.grace_seconds is {{ .values.settings.grace_seconds }}: the KV manager would stop before its engines
{{- end }}
{{- end }}
{{- end }}

{{/* The path of an engine in the values. */}}
{{- define "quire.engineKey" -}}
{{- if .entry }}models[{{ .entry }}]{{ else }}engine{{ end }}
{{- end }}

{{- define "quire.replicaFaults" -}}
{{- range append (include "quire.engines" . | fromJsonArray) (dict "key" "gateway" "values" .Values.gateway) }}
{{- $key := default (include "quire.engineKey" .) .key }}
{{- include "quire.autoscalingFaults" (dict "key" $key "values" .values) }}
{{- include "quire.budgetFaults" (dict "key" $key "budget" .values.podDisruptionBudget "replicas" (include "quire.leastReplicas" . | int)) }}
{{- $noneMissing := has (toString .values.rollingUpdate.maxUnavailable) (list "0" "0%") }}
{{- if and $noneMissing (has (toString .values.rollingUpdate.maxSurge) (list "0" "0%")) }}
{{ $key }}.rollingUpdate has maxSurge and maxUnavailable of 0: no pod could ever be replaced
{{- else if and $noneMissing (eq (default "" .values.antiAffinity) "required") }}
{{ $key }}.antiAffinity is required, but {{ $key }}.rollingUpdate.maxUnavailable is 0: with as many nodes as pods, a rollout would wait for another node
{{- end }}
{{- end }}
{{- end }}

{{- define "quire.autoscalingFaults" -}}
{{- $key := printf "%s.autoscaling" .key }}
{{- $scaling := .values.autoscaling }}
{{- $keda := default (dict "enabled" false) $scaling.keda }}
{{- if and $scaling.hpa.enabled $keda.enabled }}
{{ $key }} has both hpa and keda enabled: enable one of them
{{- end }}
{{- if include "quire.autoscaled" . }}
{{- if gt (int $scaling.minReplicas) (int $scaling.maxReplicas) }}
{{ $key }}.minReplicas is {{ $scaling.minReplicas }}, but maxReplicas is {{ $scaling.maxReplicas }}
{{- end }}
{{- if hasKey $scaling "cpuPercent" }}
{{- if not (dig "requests" "cpu" "" .values.resources) }}
{{ $key }}.hpa scales by the requested CPU, but {{ .key }}.resources.requests.cpu is not set
{{- end }}
{{- else if not (or $scaling.waitingRequests $scaling.runningRequests $scaling.hpa.extraMetrics $keda.extraTriggers) }}
{{ $key }} has no metric to scale by: set waitingRequests or runningRequests
{{- end }}
{{- end }}
{{- if and $keda.enabled (not $keda.prometheusAddress) }}
{{ $key }}.keda needs prometheusAddress
{{- end }}
{{- with $keda.fallbackReplicas }}
{{- if gt (int .) (int $scaling.maxReplicas) }}
{{ $key }}.keda.fallbackReplicas is {{ . }}, but maxReplicas is {{ $scaling.maxReplicas }}
{{- end }}
{{- end }}
{{- end }}

{{/* A budget that allows no disruption blocks every node drain. */}}
{{- define "quire.budgetFaults" -}}
{{- $key := printf "%s.podDisruptionBudget" .key }}
{{- $replicas := .replicas }}
{{- with .budget }}
{{- if .enabled }}
{{- if ne (toString .minAvailable) "" }}
{{- if ne (toString .maxUnavailable) "" }}
{{ $key }} has both minAvailable and maxUnavailable: set one of them
{{- else if ge (include "quire.podsOf" (dict "count" .minAvailable "replicas" $replicas) | int) $replicas }}
{{ $key }}.minAvailable is {{ .minAvailable }} of {{ $replicas }} pods: no node with one of them could ever be drained
{{- end }}
{{- else if has (toString .maxUnavailable) (list "0" "0%") }}
{{ $key }}.maxUnavailable is {{ .maxUnavailable }}: no node with one of the pods could ever be drained
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Number of pods for `count` of `replicas`: Kubernetes rounds percentages up. */}}
{{- define "quire.podsOf" -}}
{{- if kindIs "string" .count }}
{{- ceil (divf (mulf (trimSuffix "%" .count | float64) .replicas) 100) | int }}
{{- else }}
{{- int .count }}
{{- end }}
{{- end }}

{{/* Ranks in several pods. */}}
{{- define "quire.rankFaults" -}}
{{- range include "quire.engines" . | fromJsonArray }}
{{- $key := include "quire.engineKey" . }}
{{- $pods := int .values.ranks.pods }}
{{- $ranks := dig "tensor_parallel" 1 .values.settings | int }}
{{- if gt $pods 1 }}
{{- if mod $ranks $pods }}
{{ $key }}.settings.tensor_parallel is {{ $ranks }}, but {{ $key }}.ranks.pods is {{ $pods }}: each pod needs the same number of ranks
{{- end }}
{{- if gt (float64 .values.settings.grace_seconds) 25.0 }}
{{ $key }}.settings.grace_seconds is {{ .values.settings.grace_seconds }}, but {{ $key }}.ranks.pods is {{ $pods }}: at most 25, because torchrun kills its processes after 30 s
{{- end }}
{{- if .values.podDisruptionBudget.enabled }}
{{ $key }}.podDisruptionBudget is enabled, but {{ $key }}.ranks.pods is {{ $pods }}: it would not count the pods of other ranks, which end the engine too
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "quire.modelFaults" -}}
{{- $engines := include "quire.engines" . | fromJsonArray }}
{{- if and .Values.models (ne .Values.model "demo") }}
model and models are both given: the engines run either that model or those
{{- end }}
{{- $names := dict }}
{{- $served := dict }}
{{- range $engines }}
{{- if hasKey $names .name }}
models has {{ .entry }} twice: names must be unique
{{- end }}
{{- if and .entry (not (regexMatch "^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$" .entry)) }}
models has the name {{ quote .entry }}: a name has at most 63 characters, which are lower-case letters, digits and hyphens, and no hyphen at an end
{{- end }}
{{- $_ := set $names .name true }}
{{- if ne (default .model (get $served .served)) .model }}
models has {{ get $served .served }} and {{ .model }} under one name, {{ .served }}: set settings.model_name of one of them
{{- end }}
{{- $_ := set $served .served .model }}
{{- end }}
{{- end }}

{{/* The claim of the models, which all pods of the engines mount at the same time, those that a rollout adds too. */}}
{{- define "quire.claimFaults" -}}
{{- $pods := 0 }}
{{- $added := 0 }}
{{- $nodes := list }}
{{- range include "quire.engines" . | fromJsonArray }}
{{- $replicas := include "quire.autoscaled" . | empty | ternary .values.replicas .values.autoscaling.maxReplicas | int }}
{{- $pods = add $pods (mul $replicas .values.ranks.pods) }}
{{- $added = add $added (has (toString .values.rollingUpdate.maxUnavailable) (list "0" "0%") | ternary .values.ranks.pods 0) }}
{{- $nodes = append $nodes (default "" (get .values.nodeSelector "kubernetes.io/hostname")) }}
{{- end }}
{{- $pods = add $pods $added | int }}
{{- $several := printf "the engines have %d pods%s" $pods ($added | int | empty | ternary "" " during a rollout") }}
{{- $onOneNode := and (eq (len (uniq $nodes)) 1) (first $nodes) }}
{{- with .Values.modelCache.persistence }}
{{- if and .existingClaim (not .enabled) }}
modelCache.persistence.existingClaim is set, but persistence is not enabled: each pod would fetch its own copy of the model
{{- end }}
{{- if and .enabled (not .existingClaim) (gt $pods 1) }}
{{- if has "ReadWriteOncePod" .accessModes }}
modelCache.persistence.accessModes has ReadWriteOncePod, but {{ $several }}: all but one would never start
{{- else if not (or (has "ReadWriteMany" .accessModes) $onOneNode) }}
modelCache.persistence.accessModes is ReadWriteOnce, but {{ $several }}: those on a second node would never start, so use ReadWriteMany, or one node for all engines (engine.nodeSelector with kubernetes.io/hostname)
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "quire.tlsFaults" -}}
{{- with .Values.tls }}
{{- $secrets := list .existingSecrets.kvmanager .existingSecrets.engine .existingSecrets.gateway }}
{{- if .enabled }}
{{- if .certManager.enabled }}
{{- if compact $secrets }}
tls has both existingSecrets and certManager enabled: certificates come from one of them
{{- end }}
{{- if not .certManager.issuerRef.name }}
tls.certManager needs issuerRef.name
{{- end }}
{{- else if ne (len (compact $secrets)) 3 }}
tls needs a Secret for each of kvmanager, engine and gateway: name them in tls.existingSecrets, or enable tls.certManager
{{- end }}
{{- if and .clients.existingSecret (not .clients.serverName) }}
tls.clients.serverName is missing: the test pod must know a name in the certificate of tls.clients.existingSecret
{{- end }}
{{- if and .clients.dnsNames (or .clients.existingSecret (not .certManager.enabled)) }}
tls.clients.dnsNames are for a certificate that tls.certManager makes, and it makes none for clients
{{- end }}
{{- else if or (compact $secrets) .certManager.enabled .clients.existingSecret .clients.requireCertificates .serverName }}
tls has values, but is not enabled: nothing would be encrypted
{{- end }}
{{- end }}
{{- end }}

{{- define "quire.exposureFaults" -}}
{{- with .Values.gateway }}
{{- $keys := .apiKeys.existingSecret }}
{{- if not (or $keys .insecure) }}
{{- if ne .service.type "ClusterIP" }}
gateway.service.type is {{ .service.type }}, which opens the gateway beyond the cluster without API keys: set gateway.apiKeys.existingSecret, or gateway.insecure
{{- end }}
{{- if .ingress.enabled }}
gateway.ingress is enabled, which opens the gateway beyond the cluster without API keys: set gateway.apiKeys.existingSecret, or gateway.insecure
{{- end }}
{{- end }}
{{- range $protocol, $route := .routes }}
{{- if and $route.enabled (not (or $keys $.Values.gateway.insecure)) }}
gateway.routes.{{ $protocol }} is enabled, which opens the gateway beyond the cluster without API keys: set gateway.apiKeys.existingSecret, or gateway.insecure
{{- end }}
{{- end }}
{{- if and .ingress.enabled (not .ingress.hosts) }}
gateway.ingress needs hosts
{{- end }}
{{- end }}
{{- if and .Values.test.apiKey.existingSecret (not .Values.gateway.apiKeys.existingSecret) }}
test.apiKey.existingSecret is set, but the gateway requires no key: set gateway.apiKeys.existingSecret
{{- end }}
{{- end }}

{{- define "quire.kvmanagerFaults" -}}
{{- $manager := .Values.kvmanager }}
{{- $beside := eq $manager.placement "engine" }}
{{- if $beside }}
{{- range $name := list "initContainers" "extraContainers" "extraVolumes" "extraVolumeMounts" "podAnnotations" "podLabels" "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "priorityClassName" "terminationGracePeriodSeconds" }}
{{- if get $manager $name }}
kvmanager.{{ $name }} is set, but kvmanager.placement is engine: it is a container of the engines' pods
{{- end }}
{{- end }}
{{- if $manager.priorityClass.create }}
kvmanager.priorityClass.create is set, but kvmanager.placement is engine: it is a container of the engines' pods
{{- end }}
{{- else }}
{{- range include "quire.engines" . | fromJsonArray }}
{{- $patience := float64 .values.settings.seconds_without_kvmanager }}
{{- if and $patience (ge (float64 $manager.lostNodeSeconds) $patience) }}
kvmanager.lostNodeSeconds is {{ $manager.lostNodeSeconds }}, but {{ include "quire.engineKey" . }}.settings.seconds_without_kvmanager is {{ .values.settings.seconds_without_kvmanager }}: requests would fail before a new KV manager starts
{{- end }}
{{- $key := include "quire.engineKey" . }}
{{- $seconds := .values.settings.seconds_without_kvmanager }}
{{- range include "quire.lostNodeTolerations" $ | fromJsonArray }}
{{- if and $patience (not (hasKey . "tolerationSeconds")) }}
kvmanager.tolerations has {{ .key }} without tolerationSeconds, but {{ $key }}.settings.seconds_without_kvmanager is {{ $seconds }}: the KV manager would stay on a lost node, and requests would fail
{{- else if and $patience (ge (float64 .tolerationSeconds) $patience) }}
kvmanager.tolerations has {{ .key }} with tolerationSeconds of {{ .tolerationSeconds }}, but {{ $key }}.settings.seconds_without_kvmanager is {{ $seconds }}: requests would fail before a new KV manager starts
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- if and $manager.priorityClassName $manager.priorityClass.create }}
kvmanager.priorityClassName is set, but kvmanager.priorityClass.create too: the pods have one PriorityClass
{{- end }}
{{- end }}

{{- define "quire.routeFaults" -}}
{{- $routes := .Values.gateway.routes }}
{{- range $protocol, $route := $routes }}
{{- if and $route.enabled (not $route.parentRefs) }}
gateway.routes.{{ $protocol }} needs parentRefs: the Gateways that it belongs to
{{- end }}
{{- end }}
{{- if and $routes.http.enabled $routes.grpc.enabled }}
{{- $shared := or (empty $routes.http.hostnames) (empty $routes.grpc.hostnames) }}
{{- range $routes.http.hostnames }}
{{- $shared = or $shared (has . $routes.grpc.hostnames) }}
{{- end }}
{{- range $parent := $routes.http.parentRefs }}
{{- if and $shared (has $parent $routes.grpc.parentRefs) }}
gateway.routes.http and gateway.routes.grpc share host names at {{ $parent.name }}: it would accept only one of them, so give each its own hostnames or sectionName
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "quire.fetchFaults" -}}
{{- if .Values.modelFetch.enabled }}
{{- $persistence := .Values.modelCache.persistence }}
{{- if not (and $persistence.enabled $persistence.existingClaim) }}
modelFetch is enabled, but not modelCache.persistence with an existingClaim: a claim of the chart does not exist before an install
{{- end }}
{{- if not (include "quire.fetchedModels" . | fromJsonArray) }}
modelFetch is enabled, but the models are folders: nothing would be fetched
{{- end }}
{{- if and .Values.networkPolicy.enabled (not .Values.networkPolicy.modelSources) }}
modelFetch is enabled, but networkPolicy.modelSources is empty: nothing could be fetched
{{- end }}
{{- end }}
{{- end }}
