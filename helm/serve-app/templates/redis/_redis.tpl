{{- define "serve-app.ownRedis" -}}
{{ and .Values.gcsFaultTolerance.enabled (not .Values.gcsFaultTolerance.address) }}
{{- end }}

{{- define "serve-app.redisName" -}}
{{ .Release.Name }}-redis
{{- end }}

{{- define "serve-app.ownRedisAddress" -}}
redis://{{ include "serve-app.redisName" . }}.{{ .Release.Namespace }}.svc:6379
{{- end }}

{{- /* gcsFaultToleranceOptions. The storage namespace stays KubeRay's own, the RayCluster's UID: two clusters live during an upgrade. */}}
{{- define "serve-app.redisOptions" -}}
{{- $ft := .Values.gcsFaultTolerance -}}
{{- if eq (include "serve-app.ownRedis" .) "true" -}}
redisAddress: {{ include "serve-app.ownRedisAddress" . }}
redisPassword:
  valueFrom:
    secretKeyRef: {name: {{ include "serve-app.redisName" . }}, key: password}
{{- else -}}
redisAddress: {{ $ft.address | quote }}
{{- with $ft.username }}
redisUsername: {value: {{ . | quote }}}
{{- end }}
{{- with $ft.existingSecret }}
redisPassword:
  valueFrom:
    secretKeyRef: {name: {{ . | quote }}, key: {{ $ft.existingSecretKey | quote }}}
{{- end }}
{{- end -}}
{{- end }}
