{{/*
A Service for the pods of a component:

  root          the context of the chart
  component     kvmanager, engine or gateway
  name          of the Service
  ports         names of the ports that it has
  labels        additional labels of the pods
  pods          the component whose pods it selects, if it is another one
  portPrefix    of the names of the pods' ports
  type          ClusterIP unless given
  headless      true if its name resolves to the pods instead of an address of the Service
  annotations   of the Service
  unmonitored   true if another Service of the same pods has their metrics
*/}}
{{- define "quire.service" -}}
{{- $ports := get (include "quire.ports" .root | fromJson) .component }}
apiVersion: v1
kind: Service
metadata:
  name: {{ .name }}
  labels:
    {{- include "quire.labels" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
    {{- if not .unmonitored }}
    # Alerts select services by it: Prometheus uses it as the job, for any release name.
    quire-job: quire-{{ .component }}
    {{- end }}
  {{- with .annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  type: {{ default "ClusterIP" .type }}
  {{- if .headless }}
  # Its name resolves to all ready pods, among which gateways choose.
  clusterIP: None
  {{- end }}
  selector:
    {{- include "quire.componentLabels" (dict "root" .root "component" (default .component .pods)) | nindent 4 }}
    {{- with .labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  ports:
    {{- range .ports }}
    - name: {{ . }}
      port: {{ get $ports . }}
      targetPort: {{ $.portPrefix }}{{ . }}
    {{- end }}
{{- end }}
