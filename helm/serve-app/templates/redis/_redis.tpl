{{- define "serve-app.ownRedis" -}}
{{ and .Values.gcsFaultTolerance.enabled (not .Values.gcsFaultTolerance.address) }}
{{- end }}

{{- define "serve-app.redisName" -}}
{{ include "serve-app.fullname" . }}-redis
{{- end }}

{{- define "serve-app.ownRedisAddress" -}}
redis://{{ include "serve-app.redisName" . }}.{{ .Release.Namespace }}.svc:6379
{{- end }}

{{- /* Where the password is, of either Redis, or nothing. */}}
{{- define "serve-app.redisPassword" -}}
{{- $ft := .Values.gcsFaultTolerance -}}
{{- if $ft.existingSecret -}}
secretKeyRef: {name: {{ $ft.existingSecret | quote }}, key: {{ $ft.existingSecretKey | quote }}}
{{- else if eq (include "serve-app.ownRedis" .) "true" -}}
secretKeyRef: {name: {{ include "serve-app.redisName" . }}, key: password}
{{- end -}}
{{- end }}

{{- /* Whom Ray trusts with TLS: the image's public authorities, or what head.extraEnv says. Ray itself would trust nobody. */}}
{{- define "serve-app.redisAuthorities" -}}
{{- $own := list -}}
{{- range .Values.head.extraEnv }}{{ if hasPrefix "RAY_REDIS_CA_" .name }}{{ $own = append $own .name }}{{ end }}{{ end -}}
{{- if and .Values.gcsFaultTolerance.enabled (hasPrefix "rediss://" .Values.gcsFaultTolerance.address) (not $own) -}}
- {name: RAY_REDIS_CA_CERT, value: /etc/ssl/certs/ca-certificates.crt}
{{- end -}}
{{- end }}

{{- /* gcsFaultToleranceOptions. The storage namespace stays KubeRay's own, the RayCluster's UID: two clusters live during an upgrade. */}}
{{- define "serve-app.redisOptions" -}}
{{- $ft := .Values.gcsFaultTolerance -}}
redisAddress: {{ $ft.address | default (include "serve-app.ownRedisAddress" .) | quote }}
{{- with $ft.username }}
redisUsername: {value: {{ . | quote }}}
{{- end }}
{{- with include "serve-app.redisPassword" . }}
redisPassword:
  valueFrom:
    {{- . | nindent 4 }}
{{- end }}
{{- end }}
