{{/*
Groups of rules as a JSON list. Their selectors match this release alone, so that several releases can have rules, each
with its own thresholds.
*/}}
{{- define "quire.ruleGroups" -}}
{{- $groups := list }}
{{- $runbooks := printf "%s#" .Values.metrics.prometheusRule.runbookUrl }}
{{- range $path := include "quire.ruleFiles" . | fromJsonArray }}
{{- $text := $.Files.Get $path | replace "<matchers>" (printf "namespace=%q,release=%q" $.Release.Namespace $.Release.Name) | replace "docs/alerts.md#" $runbooks }}
{{- range $name, $value := include "quire.thresholds" $ | fromJson }}
{{- $text = $text | replace (printf "<%s>" $name) (printf "%g" (float64 $value)) }}
{{- $text = $text | replace (printf "<%s:le>" $name) (include "quire.bucket" $value) }}
{{- end }}
{{- $groups = concat $groups ($text | fromYaml).groups }}
{{- end }}
{{- toJson $groups }}
{{- end }}

{{/* Paths of the rules as a JSON list. Services with vLLM's names of metrics need no rules for them. */}}
{{- define "quire.ruleFiles" -}}
{{- $paths := list "rules/alerts.yml" "rules/vllm-rules.yml" }}
{{- range list .Values.kvmanager .Values.engine .Values.gateway }}
{{- if eq (dig "metrics_compat" "none" .settings) "vllm" }}
{{- $paths = list "rules/alerts.yml" }}
{{- end }}
{{- end }}
{{- range include "quire.engines" . | fromJsonArray }}
{{- if include "quire.metricsForRouters" . }}
{{- $paths = list "rules/alerts.yml" }}
{{- end }}
{{- end }}
{{- toJson $paths }}
{{- end }}

{{/* The thresholds of the preset, with those of the values in their place, as JSON. */}}
{{- define "quire.thresholds" -}}
{{- with .Values.metrics.prometheusRule }}
{{- $thresholds := get ($.Files.Get "rules/presets.json" | fromJson) .preset }}
{{- $_ := include "quire.overlay" (dict "base" $thresholds "over" .thresholds) }}
{{- toJson $thresholds }}
{{- end }}
{{- end }}

{{/* The bound of a histogram's bucket as metrics show it: 1.0, not 1. */}}
{{- define "quire.bucket" -}}
{{- $bound := printf "%g" (float64 .) }}
{{- $bound }}{{ if not (contains "." $bound) }}.0{{ end }}
{{- end }}
