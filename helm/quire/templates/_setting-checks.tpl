{{/*
What settings of an engine require of each other, by requirements.json, which is made of services/engine/settings.py: the
engine would refuse them at each start.
*/}}
{{- define "quire.settingFaults" -}}
{{- $requirements := .Files.Get "requirements.json" | fromJsonArray }}
{{- range include "quire.engines" . | fromJsonArray }}
{{- $key := printf "%s.settings" (include "quire.engineKey" .) }}
{{- $settings := .values.settings }}
{{- range $one := $requirements }}
{{- $value := dig $one.name $one.default $settings }}
{{- $other := dig $one.other $one.otherDefault $settings }}
{{- $differs := ternary (ne (float64 $value) (float64 $one.default)) (ne (toString $value) (toString $one.default)) (kindIs "float64" $one.default) }}
{{- $concerned := ternary (has (toString $value) $one.of) (and $differs (not (has (toString $value) $one.besides))) (gt (len $one.of) 0) }}
{{- $beside := printf "with %s.%s %v" $key $one.name $value }}
{{- range $name, $wanted := $one.where }}
{{- $concerned = and $concerned (eq (dig $name "" $settings) $wanted) }}
{{- $beside = printf "%s and %s.%s %s" $beside $key $name $wanted }}
{{- end }}
{{- $among := or (not $one.among) (has (toString $other) $one.among) }}
{{- $below := or (eq (toString $one.most) "<nil>") (le (float64 $other) (float64 $one.most)) }}
{{- if and $concerned (not (and $among $below (not (has (toString $other) $one.without)))) }}
{{ $key }}.{{ $one.other }} must {{ $one.permitted }} {{ $beside }}{{ if not $one.without }}, not {{ $other }}{{ end }}{{ with $one.because }}: {{ . }}{{ end }}
{{- end }}
{{- end }}
{{- $budget := dig "token_budget" 0 $settings | int }}
{{- $sequences := dig "max_sequences" 0 $settings | int }}
{{- if and $budget (lt $budget $sequences) }}
{{ $key }}.token_budget is {{ $budget }}, but {{ $key }}.max_sequences is {{ $sequences }}: each decoding sequence takes one token of each step
{{- end }}
{{- end }}
{{- end }}

{{/* Variables that a container would have twice: Kubernetes takes the last one, and says nothing. */}}
{{- define "quire.variableFaults" -}}
{{- $engines := include "quire.engines" . | fromJsonArray }}
{{- range append (append $engines (dict "key" "kvmanager" "values" .Values.kvmanager)) (dict "key" "gateway" "values" .Values.gateway) }}
{{- $key := default (include "quire.engineKey" .) .key }}
{{- $prefix := printf "QUIRE_%s_" (upper (default "engine" .key)) }}
{{- $names := list }}
{{- range default list .values.extraEnv }}
{{- if hasPrefix $prefix .name }}
{{ $key }}.extraEnv has {{ .name }}, which is a setting: set {{ $key }}.settings.{{ trimPrefix $prefix .name | lower }}
{{- end }}
{{- if has .name $names }}
{{ $key }}.extraEnv has {{ .name }} twice
{{- end }}
{{- $names = append $names .name }}
{{- end }}
{{- end }}
{{- end }}
