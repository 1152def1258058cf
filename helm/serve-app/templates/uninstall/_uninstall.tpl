{{- /* Metadata of what runs before an uninstall and leaves with it. Helm (from 3.18) prints the job's log where its own time ends first.
Args: root, weight. */}}
{{- define "serve-app.uninstallMetadata" -}}
{{- $when := dict "helm.sh/hook" "pre-delete" "helm.sh/hook-weight" (toString .weight) "helm.sh/hook-delete-policy" "before-hook-creation,hook-succeeded,hook-failed" "helm.sh/hook-output-log-policy" "hook-failed" -}}
{{ include "serve-app.metadata" (dict "root" .root "name" "uninstall" "annotations" $when) }}
{{- end }}
