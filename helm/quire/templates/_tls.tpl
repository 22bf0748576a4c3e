{{/*
Each component has its certificate, key and trusted authorities at /etc/quire-tls, as a server and as a client. A gateway
may have another certificate for its clients, at /etc/quire-client-tls.
*/}}

{{/* The Secret with the certificate of a component, from `root` and `component`. */}}
{{- define "quire.tlsSecret" -}}
{{- default (printf "%s-%s-tls" (include "quire.fullname" .root) .component) (get .root.Values.tls.existingSecrets .component) }}
{{- end }}

{{/* The name in all certificates of the release, because gateways reach engines by address. */}}
{{- define "quire.tlsServerName" -}}
{{- default (printf "%s.%s.svc" (include "quire.fullname" .) .Release.Namespace) .Values.tls.serverName }}
{{- end }}

{{/* The folder of a component's server certificate, from `root` and `component`. */}}
{{- define "quire.tlsFolder" -}}
{{- if and (eq .component "gateway") .root.Values.tls.clients.existingSecret }}/etc/quire-client-tls{{ else }}/etc/quire-tls{{ end }}
{{- end }}

{{/* A name in the server certificate of a component. */}}
{{- define "quire.tlsListeningName" -}}
{{- $clients := .root.Values.tls.clients }}
{{- if and (eq .component "gateway") $clients.existingSecret }}{{ $clients.serverName }}{{ else }}{{ include "quire.tlsServerName" .root }}{{ end }}
{{- end }}

{{/* True if clients must have a certificate. */}}
{{- define "quire.tlsIsMutual" -}}
{{- if or (ne .component "gateway") .root.Values.tls.clients.requireCertificates }}true{{ end }}
{{- end }}

{{/* The TLS settings of a component, as JSON. */}}
{{- define "quire.tlsSettings" -}}
{{- $settings := dict }}
{{- if .root.Values.tls.enabled }}
{{- $folder := include "quire.tlsFolder" . }}
{{- $_ := set $settings "tls_certificate" (printf "%s/tls.crt" $folder) }}
{{- $_ := set $settings "tls_key" (printf "%s/tls.key" $folder) }}
{{- if include "quire.tlsIsMutual" . }}
{{- $_ := set $settings "tls_client_ca" (printf "%s/ca.crt" $folder) }}
{{- end }}
{{- if ne .component "kvmanager" }}
{{- $_ := set $settings "link_ca" "/etc/quire-tls/ca.crt" }}
{{- $_ := set $settings "link_certificate" "/etc/quire-tls/tls.crt" }}
{{- $_ := set $settings "link_key" "/etc/quire-tls/tls.key" }}
{{- $_ := set $settings "link_server_name" (include "quire.tlsServerName" .root) }}
{{- end }}
{{- end }}
{{- toJson $settings }}
{{- end }}

{{- define "quire.tlsVolumeMounts" -}}
{{- if .root.Values.tls.enabled }}
- name: {{ include "quire.volumePrefix" . }}tls
  mountPath: /etc/quire-tls
  readOnly: true
{{- if eq (include "quire.tlsFolder" .) "/etc/quire-client-tls" }}
- name: client-tls
  mountPath: /etc/quire-client-tls
  readOnly: true
{{- end }}
{{- end }}
{{- end }}

{{- define "quire.tlsVolumes" -}}
{{- if .root.Values.tls.enabled }}
# Services read updated files again, so new certificates need no new pods.
- name: {{ include "quire.volumePrefix" . }}tls
  secret:
    secretName: {{ include "quire.tlsSecret" . }}
    defaultMode: 0440
{{- if eq (include "quire.tlsFolder" .) "/etc/quire-client-tls" }}
- name: client-tls
  secret:
    secretName: {{ .root.Values.tls.clients.existingSecret }}
    defaultMode: 0440
{{- end }}
{{- end }}
{{- end }}
