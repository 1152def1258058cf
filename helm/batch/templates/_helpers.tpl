{{- define "batch.selectorLabels" -}}
app.kubernetes.io/name: batch
app.kubernetes.io/instance: {{ .Release.Name | quote }}
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

{{- /* The URLs at which the pod reads and writes, each with a space behind it. */}}
{{- define "batch.urls" -}}
{{- range list .Values.batch.input .Values.batch.output }}{{ if contains "://" . }}{{ . }} {{ end }}{{ end -}}
{{- end }}

{{- /* The ports of those URLs, as a YAML list. An object store on another server has its address in endpoint_override. */}}
{{- define "batch.urlPorts" -}}
{{- range include "batch.urls" . | trim | splitList " " }}
{{- $server := regexFind "^[a-z0-9]+://[^/?#]*" . }}
{{- $is_plain := hasPrefix "http://" . }}
{{- if regexMatch "^(s3|gs)://" . }}
{{- $server = regexFind "[?&]endpoint_override=[^&]*" . | replace "%3A" ":" | replace "%3a" ":" }}
{{- $is_plain = regexMatch "[?&]scheme=http(&|$)" . }}
{{- end }}
- {{ regexFind ":[0-9]+$" $server | trimPrefix ":" | default (ternary "80" "443" $is_plain) | quote }}
{{- end }}
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
