{{- /* Metadata of what runs before an uninstall and leaves with it. Args: root, weight. */}}
{{- define "serve-app.uninstallMetadata" -}}
{{- $when := dict "helm.sh/hook" "pre-delete" "helm.sh/hook-weight" (toString .weight) "helm.sh/hook-delete-policy" "before-hook-creation,hook-succeeded,hook-failed" -}}
{{ include "serve-app.metadata" (dict "root" .root "name" "uninstall" "annotations" $when) }}
{{- end }}
