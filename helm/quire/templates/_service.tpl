{{/*
A Service for the pods of a component:

  root          the context of the chart
  component     kvmanager, engine or gateway
  name          of the Service
  ports         names of the ports that it has
  type          ClusterIP unless given
  headless      whether its name stands for the pods instead of an address of its own
  annotations   of the Service
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
    # Alerts know the services by this: Prometheus takes it for the job, whatever the release is called.
    quire-job: quire-{{ .component }}
  {{- with .annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  type: {{ default "ClusterIP" .type }}
  {{- if .headless }}
  # Its name stands for the addresses of all pods that are ready: gateways choose among them.
  clusterIP: None
  {{- end }}
  selector:
    {{- include "quire.componentLabels" . | nindent 4 }}
  ports:
    {{- range .ports }}
    - name: {{ . }}
      port: {{ get $ports . }}
      targetPort: {{ . }}
    {{- end }}
{{- end }}
