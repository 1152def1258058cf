{{- /* Names of other systems, which the schema lets through: a closed object could not say which key is meant. */}}
{{- define "serve-app.lintForeign" -}}
{{- $rules := .Files.Get "files/rules.yaml" | fromYaml -}}
{{- $sections := dict "config" .Values.config "config.ingress" (.Values.config.ingress | default dict) -}}
{{- range $name, $model := .Values.config.models -}}
{{- $_ := set $sections (printf "config.models.%s" $name) $model -}}
{{- end -}}
{{- range $path, $section := $sections -}}
{{- range $key, $value := $section -}}
{{- with index $rules.foreign $key -}}
{{- list "foreign-key" (printf "%s.%s: unknown key; %s" $path $key .) | toJson | nindent 0 -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $key, $meant := $rules.foreignValues -}}
{{- if hasKey $.Values $key -}}
{{- list "foreign-key" (printf "%s: unknown key; %s" $key $meant) | toJson | nindent 0 -}}
{{- end -}}
{{- end -}}
{{- end }}
