{{- /* Metadata of a policy. Args: root, name. */}}
{{- define "loadtest.policyMetadata" -}}
name: {{ .root.Release.Name }}-{{ .name }}
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

{{- /* The port of an address like http://minio:9000, 443 of none. */}}
{{- define "loadtest.portOf" -}}
{{- $host := regexReplaceAll "^[a-z]*://|/.*$" . "" -}}
{{- regexFind ":[0-9]+$" $host | trimPrefix ":" | default (ternary "80" "443" (hasPrefix "http:" .)) -}}
{{- end }}
