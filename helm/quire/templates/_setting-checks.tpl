{{/* Settings of an engine that exclude each other: it would refuse them at each start (services/engine/settings.py). */}}
{{- define "quire.settingFaults" -}}
{{- range include "quire.engines" . | fromJsonArray }}
{{- $key := printf "%s.settings" (include "quire.engineKey" .) }}
{{- $settings := .values.settings }}
{{- $device := dig "device" "auto" $settings }}
{{- $backend := dig "attention_backend" "auto" $settings }}
{{- $ranks := dig "tensor_parallel" 1 $settings | int }}
{{- $share := dig "gpu_memory_utilization" 0.9 $settings | float64 }}
{{- if ne $share 0.9 }}
{{- $given := printf "%s.gpu_memory_utilization is %v" $key $share }}
{{- if eq $device "cpu" }}
{{ $given }}, but {{ $key }}.device is cpu: the pool of a CPU has cache_mib
{{- end }}
{{- range $name := list "device_blocks" "cache_mib" }}
{{- with dig $name 0 $settings | int }}
{{ $given }}, but {{ $key }}.{{ $name }} is {{ . }}: give one of them
{{- end }}
{{- end }}
{{- if eq $backend "flex" }}
{{ $given }}, but {{ $key }}.attention_backend is flex, whose pool has cache_mib
{{- end }}
{{- end }}
{{- $excluded := get (dict "triton" "cpu" "cpu" "cuda") $backend }}
{{- if and $excluded (eq $device $excluded) }}
{{ $key }}.attention_backend is {{ $backend }}, but {{ $key }}.device is {{ $device }}
{{- end }}
{{- if and (eq $backend "flex") (gt $ranks 1) }}
{{ $key }}.attention_backend is flex, which requires a tensor_parallel of 1
{{- end }}
{{- $kvDtype := dig "kv_dtype" "auto" $settings }}
{{- if ne $kvDtype "auto" }}
{{- if gt $ranks 1 }}
{{ $key }}.kv_dtype is {{ $kvDtype }}, which requires a tensor_parallel of 1
{{- end }}
{{- if or (has $backend (list "flex" "triton")) (and (eq $device "cuda") (eq $backend "auto")) }}
{{ $key }}.kv_dtype is {{ $kvDtype }}, which {{ $key }}.attention_backend {{ $backend }} does not support{{ if eq $device "cuda" }} on a GPU{{ end }}: use torch
{{- end }}
{{- end }}
{{- $weights := dig "weights" "auto" $settings }}
{{- if and (ne $weights "auto") (not (has (dig "dtype" "auto" $settings) (list "auto" "bfloat16"))) }}
{{ $key }}.weights is {{ $weights }}, but {{ $key }}.dtype is {{ $settings.dtype }}: it must be auto or bfloat16
{{- else if has $weights (list "int8" "int4") }}
{{- if eq $device "cuda" }}
{{ $key }}.weights is {{ $weights }}, which only the CPU's kernels run, but {{ $key }}.device is cuda
{{- else if not (has $backend (list "auto" "cpu")) }}
{{ $key }}.weights is {{ $weights }}, which only the CPU's kernels run, but {{ $key }}.attention_backend is {{ $backend }}
{{- else if gt $ranks 1 }}
{{ $key }}.weights is {{ $weights }}, which requires a tensor_parallel of 1
{{- end }}
{{- end }}
{{- with dig "speculate_ngram" 0 $settings | int }}
{{- if gt $ranks 1 }}
{{ $key }}.speculate_ngram is {{ . }}, but {{ $key }}.tensor_parallel is {{ $ranks }}: ranks verify no proposals
{{- else if eq $device "cuda" }}
{{ $key }}.speculate_ngram is {{ . }}, but {{ $key }}.device is cuda: steps of a GPU run ahead of their tokens
{{- else if eq $backend "triton" }}
{{ $key }}.speculate_ngram is {{ . }}, but {{ $key }}.attention_backend is triton: steps of a GPU run ahead of their tokens
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
