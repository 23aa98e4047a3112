{{- define "lanterne.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 45 | trimSuffix "-" }}
{{- end }}

{{/* A release that is called like the chart does not repeat it. 45: room for "-collector-ingest" in 63. */}}
{{- define "lanterne.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 45 | trimSuffix "-" }}
{{- else if contains (include "lanterne.name" .) .Release.Name }}
{{- .Release.Name | trunc 45 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "lanterne.name" .) | trunc 45 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* `helm template` does not ask a cluster: kubeVersion says what to render for. */}}
{{- define "lanterne.kubeVersion" -}}{{ .Values.kubeVersion | default .Capabilities.KubeVersion.Version }}{{- end }}

{{- define "lanterne.agent" -}}{{ include "lanterne.fullname" . }}-agent{{- end }}
{{- define "lanterne.collector" -}}{{ include "lanterne.fullname" . }}-collector{{- end }}

{{/* Labels that select; call with (dict "root" . "part" "agent"). */}}
{{- define "lanterne.selector" -}}
app.kubernetes.io/name: {{ include "lanterne.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end }}

{{- define "lanterne.labels" -}}
{{ include "lanterne.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "lanterne.image" -}}
{{- $image := .image -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ $image.tag | default .root.Chart.AppVersion }}
{{- end -}}
{{- end }}

{{- define "lanterne.agent.account" -}}
{{- if .Values.agent.serviceAccount.create -}}
{{ .Values.agent.serviceAccount.name | default (include "lanterne.agent" .) }}
{{- else -}}
{{ .Values.agent.serviceAccount.name | default "default" }}
{{- end -}}
{{- end }}

{{- define "lanterne.collector.account" -}}
{{- if .Values.collector.serviceAccount.create -}}
{{ .Values.collector.serviceAccount.name | default (include "lanterne.collector" .) }}
{{- else -}}
{{ .Values.collector.serviceAccount.name | default "default" }}
{{- end -}}
{{- end }}

{{/* Where agents report to: every collector by its own name, the standby ones last. */}}
{{- define "lanterne.addresses" -}}
{{- if .Values.agent.collectors -}}
{{ join "," .Values.agent.collectors }}
{{- else -}}
{{- $found := list -}}
{{- range $i := until (int .Values.collector.replicas) -}}
{{- $found = append $found (printf "%s-%d.%s-ingest.%s.svc:%d" (include "lanterne.collector" $) $i (include "lanterne.collector" $) $.Release.Namespace (int $.Values.collector.ports.ingest)) -}}
{{- end -}}
{{ join "," $found }}
{{- end -}}
{{- end }}

{{- define "lanterne.tls.agent" -}}{{ .Values.tls.agentSecret | default (printf "%s-tls" (include "lanterne.agent" .)) }}{{- end }}
{{- define "lanterne.tls.collector" -}}{{ .Values.tls.collectorSecret | default (printf "%s-tls" (include "lanterne.collector" .)) }}{{- end }}
{{- define "lanterne.token" -}}{{ .Values.token.existingSecret | default (printf "%s-token" (include "lanterne.fullname" .)) }}{{- end }}
