{{- /* Names, labels and images. Release names have at most 36 characters, so suffixes of up to 26 fit into 63. */}}

{{- define "loadtest.selectorLabels" -}}
app.kubernetes.io/name: loadtest
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "loadtest.labels" -}}
{{ include "loadtest.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- /* Labels of pods; those of a run have its name. Args: root, component. */}}
{{- define "loadtest.podLabels" -}}
{{ include "loadtest.selectorLabels" .root }}
app.kubernetes.io/component: {{ .component }}
{{- if and (eq .root.Values.mode "job") (has .component (list "master" "worker")) }}
loadtest/run: {{ include "loadtest.run" .root | quote }}
{{- end }}
{{- end }}

{{- define "loadtest.run" -}}
{{ .Values.job.run | default (print .Release.Revision) }}
{{- end }}

{{- /* The Service by which workers find their master: of each run its own, or workers of the last one would join the next. */}}
{{- define "loadtest.bus" -}}
{{- if eq .Values.mode "job" -}}
{{ .Release.Name }}-{{ include "loadtest.run" . }}-master
{{- else -}}
{{ .Release.Name }}-master
{{- end -}}
{{- end }}

{{- /* Args: image (repository, tag, digest), default (tag). */}}
{{- define "loadtest.imageRef" -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}:{{ .image.tag | default .default }}
{{- end -}}
{{- end }}

{{- define "loadtest.image" -}}
image: {{ include "loadtest.imageRef" (dict "image" .Values.image "default" .Chart.AppVersion) }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end }}

{{- define "loadtest.claim" -}}
{{ .Values.results.persistence.existingClaim | default (printf "%s-results" .Release.Name) }}
{{- end }}

{{- /* Whether the reports of runs by Jobs have a pod of their own: true or nothing. */}}
{{- define "loadtest.reportPod" -}}
{{- if and (eq .Values.mode "job") .Values.report.enabled .Values.results.persistence.enabled }}true{{ end -}}
{{- end }}

{{- /* Whether the master lists pods: true or nothing. */}}
{{- define "loadtest.listsPods" -}}
{{- if dig "observe" "kubernetes_selector" "" .Values.scenario }}true{{ end -}}
{{- end }}

{{- define "loadtest.deadline" -}}
{{- $sum := addf (dig "duration_s" 60 .Values.scenario) (dig "drain_s" 120 .Values.scenario) .Values.job.workersWaitSeconds 900 -}}
{{ .Values.job.activeDeadlineSeconds | default (ceil $sum) | int64 }}
{{- end }}

{{- define "loadtest.securityContext" -}}
runAsNonRoot: true
allowPrivilegeEscalation: false
privileged: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end }}
