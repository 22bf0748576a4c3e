{{/* The chart's name, for labels. */}}
{{- define "quire.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/*
The common part of all names. A name has 63 characters at most, and "-kvmanager" is added to this. A release's name has
53 at most anyway.
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

{{/* Labels that all three services have in common, and that no other release has. */}}
{{- define "quire.selectorLabels" -}}
app.kubernetes.io/name: {{ include "quire.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
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

{{/* The name of the claim that keeps models. */}}
{{- define "quire.modelCacheClaim" -}}
{{- default (printf "%s-models" (include "quire.fullname" .)) .Values.modelCache.persistence.existingClaim }}
{{- end }}
