{{- /* A selector of the release's pods of these components. Args: root, components (list). */}}
{{- define "serve-app.podsOf" -}}
matchLabels:
  {{- include "serve-app.selectorLabels" .root | nindent 2 }}
matchExpressions:
  - {key: app.kubernetes.io/component, operator: In, values: {{ toJson .components }}}
{{- end }}

{{- /* The port of an address like http://minio:9000. Args: address, default. */}}
{{- define "serve-app.portOf" -}}
{{- regexReplaceAll "^[a-z]*://|/.*$" .address "" | regexFind ":[0-9]+$" | trimPrefix ":" | default .default -}}
{{- end }}

{{- /* What Ray's nodes need of each other: GCS, node and object manager, agents, worker processes; and the links to the replicas.
The ports that values set go by the containers' names, here and in the other policies: after a change the pods of the old Ray cluster,
which still serve, have other numbers than the new ones. */}}
{{- define "serve-app.meshPorts" -}}
- {protocol: TCP, port: 6379}
- {protocol: TCP, port: 8076, endPort: 8079}
- {protocol: TCP, port: 52365}
- {protocol: TCP, port: 10002, endPort: 10999}
{{- $sharing := 1 }}
{{- range include "serve-app.groups" . | fromYamlArray }}{{ $sharing = max $sharing (include "serve-app.sharing" . | int) }}{{ end }}
{{- range include "serve-app.linkPorts" (dict "first" 1 "number" $sharing) | fromJsonArray }}
- {protocol: TCP, port: {{ .name }}}
{{- end }}
{{- end }}

{{- /* The ports of the replicas in one pod, link, link-2 and so on: a JSON list of a container's ports. Args: first (port), number. */}}
{{- define "serve-app.linkPorts" -}}
{{- $ports := list -}}
{{- range $i := until (int .number) -}}
{{- $ports = append $ports (dict "name" (ternary (printf "link-%d" (add $i 1)) "link" (gt $i 0)) "containerPort" (add $.first $i)) -}}
{{- end -}}
{{ toJson $ports }}
{{- end }}
