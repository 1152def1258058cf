{{- /* Metadata of what runs before an uninstall and leaves with it. Args: root, weight. */}}
{{- define "serve-app.uninstallMetadata" -}}
name: {{ .root.Release.Name }}-uninstall
labels:
  {{- include "serve-app.labels" .root | nindent 2 }}
annotations:
  helm.sh/hook: pre-delete
  helm.sh/hook-weight: {{ .weight | quote }}
  helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded,hook-failed
{{- end }}
