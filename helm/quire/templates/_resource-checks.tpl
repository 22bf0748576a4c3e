{{/* Resources with which no pod of an engine could serve. */}}
{{- define "quire.resourceFaults" -}}
{{- range include "quire.engines" . | fromJsonArray }}
{{- $key := include "quire.engineKey" . }}
{{- $settings := .values.settings }}
{{- $limits := default dict .values.resources.limits }}
{{- $pods := int .values.ranks.pods }}
{{- $ranks := div (dig "tensor_parallel" 1 $settings | int) $pods }}
{{- $device := dig "device" "auto" $settings }}
{{- $gpus := include "quire.gpusOf" .values.resources | fromJson }}
{{- if and (eq $device "cuda") (not $gpus) (not .values.resources.claims) }}
{{ $key }}.settings.device is cuda, but {{ $key }}.resources has no GPU: the engine would find none, so set {{ $key }}.resources.limits, such as nvidia.com/gpu: 1
{{- end }}
{{- with get $gpus "nvidia.com/gpu" }}
{{- if and (ne $device "cpu") (lt (int .) (int $ranks)) }}
{{ $key }}.settings.tensor_parallel needs {{ $ranks }} GPUs in a pod, but {{ $key }}.resources.limits has nvidia.com/gpu: {{ int . }}
{{- end }}
{{- end }}
{{- $onCPU := or (eq $device "cpu") (and (eq $device "auto") (not $gpus) (not .values.resources.claims)) }}
{{- if and $onCPU $limits.memory }}
{{- $cache := dig "device_blocks" 0 $settings | int | empty | ternary (mul (dig "cache_mib" 0 $settings | int | default 1024) $ranks) 0 }}
{{- $needed := add $cache 768 }}
{{- $given := include "quire.mebibytes" $limits.memory | float64 }}
{{- if and $given (lt $given (float64 $needed)) }}
{{ $key }}.resources.limits.memory is {{ $limits.memory }}, but the process (768 MiB){{ if $cache }} and its cache (settings.cache_mib, {{ $cache }} MiB){{ end }} need {{ $needed }}Mi before any weights: the kernel would kill the engine
{{- end }}
{{- end }}
{{- if .values.keepBlocks.enabled }}
{{- include "quire.keptFaults" (dict "key" $key "settings" $settings "sizeLimit" .values.keepBlocks.sizeLimit "onCPU" $onCPU) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Why an engine could not keep its blocks, from `key`, `settings`, `sizeLimit` and `onCPU`. */}}
{{- define "quire.keptFaults" -}}
{{- $ranks := dig "tensor_parallel" 1 .settings | int }}
{{- if not .onCPU }}
{{ .key }}.keepBlocks is enabled, but the engine has a GPU, whose memory ends with its process
{{- else if eq (dig "attention_backend" "auto" .settings) "triton" }}
{{ .key }}.keepBlocks is enabled, but {{ .key }}.settings.attention_backend is triton: the memory of a GPU ends with its process
{{- end }}
{{- if gt $ranks 1 }}
{{ .key }}.keepBlocks is enabled, but {{ .key }}.settings.tensor_parallel is {{ $ranks }}: ranks keep no blocks
{{- end }}
{{- $cache := dig "device_blocks" 0 .settings | int | empty | ternary (dig "cache_mib" 0 .settings | int | default 1024) 0 }}
{{- $given := include "quire.mebibytes" .sizeLimit | float64 }}
{{- if and $given (le $given (float64 $cache)) }}
{{ .key }}.keepBlocks.sizeLimit is {{ .sizeLimit }}, but the blocks (settings.cache_mib, {{ $cache }} MiB) need more, with 64 bytes for each: the engine would not start
{{- end }}
{{- end }}

{{/* The extended resources of a container that are GPUs, with their numbers, as JSON: of limits, which are requests too. */}}
{{- define "quire.gpusOf" -}}
{{- $found := dict }}
{{- range $name, $number := default dict .limits }}
{{- if and $number (regexMatch "(^nvidia\\.com/|gpu)" $name) }}
{{- $_ := set $found $name $number }}
{{- end }}
{{- end }}
{{- toJson $found }}
{{- end }}

{{/* A quantity of memory in MiB; 0 if it is none that is known here. Kubernetes refuses a wrong one itself. */}}
{{- define "quire.mebibytes" -}}
{{- $text := toString . }}
{{- $unit := regexFind "[A-Za-z]+$" $text }}
{{- $bytes := dict "" 1 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 }}
{{- if hasKey $bytes $unit }}
{{- divf (mulf (trimSuffix $unit $text | float64) (get $bytes $unit)) 1048576 }}
{{- else }}0{{ end }}
{{- end }}
