{{- define "serve-app.lint" -}}
{{- end }}
