{{- define "batch.selectorLabels" -}}
app.kubernetes.io/name: batch
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "batch.labels" -}}
{{ include "batch.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "batch.run" -}}
{{ .Values.job.run | default (print .Release.Revision) }}
{{- end }}

{{- define "batch.claim" -}}
{{ .Values.data.existingClaim | default (printf "%s-data" .Release.Name) }}
{{- end }}

{{- define "batch.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end }}

{{- /* Whether the pod reads or writes at a URL: true or nothing. */}}
{{- define "batch.hasUrl" -}}
{{- if contains "://" (print .Values.batch.input .Values.batch.output) }}true{{ end -}}
{{- end }}

{{- define "batch.input" -}}
{{- if or (contains "://" .Values.batch.input) (hasPrefix "/" .Values.batch.input) -}}
{{ .Values.batch.input }}
{{- else -}}
/data/{{ .Values.batch.input }}
{{- end -}}
{{- end }}

{{- /* The arguments that say where answers go. The journal is on the volume in any case. */}}
{{- define "batch.outputArgs" -}}
{{- if contains "://" .Values.batch.output -}}
- {{ printf "--output=%s" .Values.batch.output | quote }}
- {{ printf "--journal=/data/%s.journal" (.Values.batch.output | splitList "?" | first | base) | quote }}
{{- else -}}
- {{ printf "--output=/data/%s" .Values.batch.output | quote }}
{{- end -}}
{{- end }}
