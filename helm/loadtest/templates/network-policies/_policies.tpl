{{- /* Metadata of a policy. Args: root, name. */}}
{{- define "loadtest.policyMetadata" -}}
name: {{ printf "%s-%s" .root.Release.Name .name | quote }}
labels:
  {{- include "loadtest.labels" .root | nindent 2 }}
{{- end }}

{{- /* A selector of the release's pods of these components. Args: root, components (list). */}}
{{- define "loadtest.podsOf" -}}
matchLabels:
  {{- include "loadtest.selectorLabels" .root | nindent 2 }}
matchExpressions:
  - {key: app.kubernetes.io/component, operator: In, values: {{ toJson .components }}}
{{- end }}
