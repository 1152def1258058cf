{{- /* What a model's pods ask for and where they go, which its headroom pods share. Args: root, model. As YAML: group, labels,
affinity, resources, runtimeClassName of serve-app.rayPod. */}}
{{- define "serve-app.modelPlacement" -}}
{{- $pods := include "serve-app.modelPods" . | fromYaml -}}
{{- $ours := include "serve-app.selectorLabels" .root | fromYaml -}}
{{- $made := dict "group" (set (deepCopy $ours) "ray.io/group" .model.group) "labels" dict
    "affinity" $pods.affinity "resources" $pods.resources "runtimeClassName" "" -}}
{{- if and $pods.nodesWithin (gt (int $pods.nodes) 1) (not $pods.affinity.podAffinity) -}}
{{- $near := dict "serve-app/nodes-within" .model.group -}}{{- /* of headroom pods, too: they may be there before the model's */ -}}
{{- $term := dict "topologyKey" $pods.nodesWithin "labelSelector" (dict "matchLabels" (merge (deepCopy $near) $ours)) -}}
{{- $_ := set $made "labels" (merge $made.labels $near) -}}
{{- $_ := set $made.affinity "podAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (list $term)) -}}
{{- end -}}
{{- with int $pods.gpus -}}
{{- $_ := set $made "runtimeClassName" $pods.runtimeClassName -}}
{{- $_ := set $made.resources "limits" (set ($pods.resources.limits | default dict) $pods.gpuResource .) -}}
{{- if and $pods.onePerNode (not $pods.affinity.podAntiAffinity) -}}
{{- $alone := dict "serve-app/one-per-node" "true" -}}
{{- $term := dict "topologyKey" "kubernetes.io/hostname" "labelSelector" (dict "matchLabels" (merge (deepCopy $alone) $ours)) -}}
{{- $_ := set $made "labels" (merge $made.labels $alone) -}}
{{- $_ := set $made.affinity "podAntiAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (list $term)) -}}
{{- end -}}
{{- end -}}
{{ toYaml $made }}
{{- end }}

{{- /* Where pods may go, of serve-app.rayPod's args: pods, group, affinity, runtimeClassName. */}}
{{- define "serve-app.scheduling" -}}
{{- with .runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- with .pods.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .pods.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .pods.extra.schedulerName }}
schedulerName: {{ . | quote }}
{{- end }}
{{- if .pods.extra.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range .pods.extra.topologySpreadConstraints }}
  - {{ ternary . (set (deepCopy .) "labelSelector" (dict "matchLabels" $.group)) (hasKey . "labelSelector") | toYaml | nindent 4 | trim }}
  {{- end }}
{{- else if .pods.topologySpread }}
topologySpreadConstraints:
  {{- $keys := list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
  {{- range $key := ternary (last $keys | list) $keys (gt (int .pods.nodes) 1) }}{{- /* the pods of one engine belong near each other */}}
  - topologyKey: {{ $key }}
    maxSkew: 1
    whenUnsatisfiable: {{ $.pods.topologySpread }}
    nodeTaintsPolicy: Honor # a node that is being drained does not count as one that has too few pods
    labelSelector:
      matchLabels:
        {{- toYaml $.group | nindent 8 }}
  {{- end }}
{{- end }}
{{- end }}

{{- /* Where a pod beside the serving ones may go. Args: its settings. */}}
{{- define "serve-app.placement" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
