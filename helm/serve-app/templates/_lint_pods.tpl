{{- /* The settings of all pods of Ray by their path in the values, those of byModel over what they are laid over. */}}
{{- define "serve-app.allPods" -}}
{{- $all := dict "head" .Values.head "ingressPods" .Values.ingressPods "modelPods" (omit .Values.modelPods "byModel") -}}
{{- range $name, $_ := .Values.modelPods.byModel -}}
{{- $_ := set $all (printf "modelPods.byModel.%s" $name) (include "serve-app.modelPods" (dict "root" $ "name" $name) | fromYaml) -}}
{{- end -}}
{{ toYaml $all }}
{{- end }}

{{- /* A quantity of Kubernetes as a number. */}}
{{- define "serve-app.quantity" -}}
{{- $number := regexFind "^[0-9.]+(e[+][0-9]+)?" (toString .) -}}
{{- $units := dict "" 1 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{ mulf $number (index $units (trimPrefix $number (toString .))) }}
{{- end }}

{{- define "serve-app.lintPods" -}}
{{- $redis := .Values.gcsFaultTolerance.redis -}}
{{- $all := dict "autoscaler" .Values.autoscaler "gcsFaultTolerance.redis" $redis "weights" .Values.weights "test" .Values.test -}}
{{- range $path, $pods := merge $all (include "serve-app.allPods" . | fromYaml) -}}
{{- range $name, $request := $pods.resources.requests -}}
{{- $limit := index ($pods.resources.limits | default dict) $name -}}
{{- if and $limit (gt (include "serve-app.quantity" $request | float64) (include "serve-app.quantity" $limit | float64)) -}}
{{- fail (printf "%s.resources.requests.%s is %v, but %s.resources.limits.%s is %v: Kubernetes would refuse the pod; raise the latter" $path $name $request $path $name $limit) -}}
{{- end -}}
{{- end -}}
{{- range $label, $_ := $pods.podLabels -}}
{{- if regexMatch "^(app[.]kubernetes[.]io/(name|instance|component)$|(ray[.]io|serve-app)/)" $label -}}
{{- fail (printf "%s.podLabels has %s, by which Services, policies and budgets find the pods: remove it, or use another name" $path $label) -}}
{{- end -}}
{{- end -}}
{{- if and $pods.shmSize (gt (float64 $.Values.objectStore.bytes) (include "serve-app.quantity" $pods.shmSize | float64)) -}}
{{- fail (printf "objectStore.bytes is %d, but %s.shmSize is %v: Ray would keep its objects on disk; raise the latter" (int64 $.Values.objectStore.bytes) $path $pods.shmSize) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- /* What values may not add to a container of Ray. Args: component, pods (their settings), env, mounts, volumes (the chart's, lists). */}}
{{- define "serve-app.lintAdditions" -}}
{{- $path := get (dict "head" "head" "ingress" "ingressPods" "model" "modelPods") .component -}}
{{- range list (list "extraEnv" "name" .env) (list "extraVolumes" "name" .volumes) (list "extraVolumeMounts" "mountPath" .mounts) -}}
{{- $taken := list -}}{{- $key := index . 1 -}}
{{- range index . 2 }}{{ $taken = append $taken (index . $key) }}{{ end -}}
{{- $where := index . 0 -}}
{{- range index $.pods $where -}}
{{- if has (index . $key) $taken -}}
{{- fail (printf "%s.%s has the %s %s, which the chart uses itself, or which is there twice: remove it, or choose another" $path $where $key (index . $key)) -}}
{{- end -}}
{{- $taken = append $taken (index . $key) -}}
{{- end -}}
{{- end -}}
{{- $names := list -}}
{{- range concat .volumes .pods.extraVolumes }}{{ $names = append $names .name }}{{ end -}}
{{- range .pods.extraVolumeMounts -}}
{{- if not (has .name $names) -}}
{{- fail (printf "%s.extraVolumeMounts mounts %s at %s, but %s.extraVolumes has no volume of that name: add it there" $path .name .mountPath $path) -}}
{{- end -}}
{{- end -}}
{{- end }}
