{{/*
Fractions out of bounds that were given as strings, as Helm takes those of `--set`. The schema checks numbers.
*/}}
{{- define "quire.fractionFaults" -}}
{{- $bounds := .Files.Get "fractions.json" | fromJson }}
{{- $levels := list (dict "key" "metrics.prometheusRule.thresholds" "bounds" $bounds.thresholds "values" .Values.metrics.prometheusRule.thresholds) }}
{{- range $component := list "kvmanager" "gateway" }}
{{- $levels = append $levels (dict "key" (printf "%s.settings" $component) "bounds" (get $bounds $component) "values" (get $.Values $component).settings) }}
{{- end }}
{{- range include "quire.engines" . | fromJsonArray }}
{{- $levels = append $levels (dict "key" (printf "%s.settings" (include "quire.engineKey" .)) "bounds" $bounds.engine "values" .values.settings) }}
{{- end }}
{{- range $level := $levels }}
{{- range $name, $value := .values }}
{{- $own := get $level.bounds $name }}
{{- if and $own (kindIs "string" $value) }}
{{- $number := float64 $value }}
{{- if and (hasKey $own "minimum") (lt $number (float64 $own.minimum)) }}
- {{ $level.key }}.{{ $name }} is {{ $value }}, but it must be at least {{ $own.minimum }}
{{- else if and (hasKey $own "exclusiveMinimum") (le $number (float64 $own.exclusiveMinimum)) }}
- {{ $level.key }}.{{ $name }} is {{ $value }}, but it must be more than {{ $own.exclusiveMinimum }}
{{- else if and (hasKey $own "maximum") (gt $number (float64 $own.maximum)) }}
- {{ $level.key }}.{{ $name }} is {{ $value }}, but it must be at most {{ $own.maximum }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
