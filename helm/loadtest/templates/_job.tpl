{{- /* The steps of a run, in order: run, upload, verdict. The first leaves its verdict to the last, so that results are uploaded
       whatever they say. */}}
{{- define "loadtest.runContainer" -}}
{{- $args := concat (list "/etc/loadtest/scenario/scenario.yaml" "--target" "$(TARGET_URL)" "--out" "/results/$(POD_NAME)" "--workers" (print (int64 .Values.workers.replicas)) "--bind" "0.0.0.0:5557" "--wait-s" (print (int64 .Values.job.workersWaitSeconds)) "--judge-later") (include "loadtest.keyArgs" . | fromJsonArray) -}}
{{- $env := printf "%s\n%s" (include "loadtest.podNameEnv" .) (include "loadtest.targetEnv" .) -}}
{{ include "loadtest.container" (dict "root" . "extra" true "name" "run" "command" (list "serve-app-loadtest" "run") "args" $args "env" $env "mounts" (include "loadtest.masterMounts" .)) }}
ports: [{name: bus, containerPort: 5557}]
resources:
  {{- toYaml .Values.master.resources | nindent 2 }}
{{- end }}

{{- define "loadtest.uploadContainer" -}}
{{- $s3 := .Values.results.s3 -}}
name: upload
image: {{ include "loadtest.imageRef" (dict "image" $s3.image) }}
imagePullPolicy: {{ $s3.image.pullPolicy }}
terminationMessagePolicy: FallbackToLogsOnError
securityContext:
  {{- include "loadtest.securityContext" . | nindent 2 }}
command: [aws, s3, cp, --recursive, --no-progress]
args: [/results/$(POD_NAME), {{ printf "%s/$(POD_NAME)" (trimSuffix "/" $s3.uri) | quote }}]
env:
  - {name: HOME, value: /tmp}
  {{- include "loadtest.podNameEnv" . | nindent 2 }}
  {{- with $s3.region }}
  - {name: AWS_REGION, value: {{ . | quote }}}
  {{- end }}
  {{- with $s3.endpoint }}
  - {name: AWS_ENDPOINT_URL_S3, value: {{ . | quote }}}
  {{- end }}
resources:
  {{- toYaml $s3.resources | nindent 2 }}
volumeMounts:
  - {name: tmp, mountPath: /tmp}
  - {name: results, mountPath: /results, readOnly: true}
{{- end }}

{{- define "loadtest.verdictContainer" -}}
{{ include "loadtest.container" (dict "root" . "name" "verdict" "command" (list "serve-app-loadtest" "verdict") "args" (list "/results/$(POD_NAME)") "env" (include "loadtest.podNameEnv" .) "mounts" "- {name: results, mountPath: /results, readOnly: true}") }}
resources:
  {{- toYaml .Values.master.resources | nindent 2 }}
{{- end }}

{{- /* A container as an entry of a list. Args: container (YAML). */}}
{{- define "loadtest.entry" -}}
-{{ .container | indent 2 | trimPrefix " " }}
{{- end }}

{{- /* What ends a Job at its first failure: nothing is tried again, and the Job's condition names container and exit code. */}}
{{- define "loadtest.once" -}}
backoffLimit: 0
activeDeadlineSeconds: {{ include "loadtest.deadline" . }}
{{- if .Values.job.ttlSecondsAfterFinished }}
ttlSecondsAfterFinished: {{ int64 .Values.job.ttlSecondsAfterFinished }}
{{- end }}
podReplacementPolicy: Failed
podFailurePolicy:
  rules:
    - action: FailJob
      onExitCodes: {operator: NotIn, values: [0]}
    - action: FailJob
      onPodConditions: [{type: DisruptionTarget, status: "True"}]
{{- end }}
