{{/*
Each component has its certificate and key, and the certificates that it trusts, at /etc/quire-tls. With them it listens and
calls. A gateway may listen with another certificate, which its clients know: that is at /etc/quire-client-tls.
*/}}

{{/* The Secret with the certificate of a component: of `root` and `component`. */}}
{{- define "quire.tlsSecret" -}}
{{- default (printf "%s-%s-tls" (include "quire.fullname" .root) .component) (get .root.Values.tls.existingSecrets .component) }}
{{- end }}

{{/* The name that all certificates of the release have in common: engines are called by their addresses. */}}
{{- define "quire.tlsServerName" -}}
{{- default (printf "%s.%s.svc" (include "quire.fullname" .) .Release.Namespace) .Values.tls.serverName }}
{{- end }}

{{/* The folder of the certificate that a component listens with: of `root` and `component`. */}}
{{- define "quire.tlsFolder" -}}
{{- if and (eq .component "gateway") .root.Values.tls.clients.existingSecret }}/etc/quire-client-tls{{ else }}/etc/quire-tls{{ end }}
{{- end }}

{{/* A name in the certificate that a component listens with. */}}
{{- define "quire.tlsListeningName" -}}
{{- $clients := .root.Values.tls.clients }}
{{- if and (eq .component "gateway") $clients.existingSecret }}{{ $clients.serverName }}{{ else }}{{ include "quire.tlsServerName" .root }}{{ end }}
{{- end }}

{{/* Whether only those get in who have a certificate. */}}
{{- define "quire.tlsIsMutual" -}}
{{- if or (ne .component "gateway") .root.Values.tls.clients.requireCertificates }}true{{ end }}
{{- end }}

{{/* The settings of TLS of a component, as JSON. */}}
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
- name: tls
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
# Read again when Kubernetes has updated it: no new pods for new certificates.
- name: tls
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
