{{- /* A quantity of Kubernetes as a number. */}}
{{- define "serve-app.quantity" -}}
{{- $number := regexFind "^[0-9.]+(e[+][0-9]+)?" (toString .) -}}
{{- $units := dict "" 1 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{ mulf $number (index $units (trimPrefix $number (toString .))) }}
{{- end }}

{{- /* Every container that values give resources. A model's settings are judged as its pods get them. */}}
{{- define "serve-app.lintPods" -}}
{{- $v := .Values -}}
{{- range $path, $pods := dict "head" $v.head "ingressPods" $v.ingressPods "autoscaler" $v.autoscaler
    "gcsFaultTolerance.redis" $v.gcsFaultTolerance.redis "weights" $v.weights "test" $v.test -}}
{{- include "serve-app.lintPod" (dict "root" $ "path" $path "pods" $pods "whose" "") -}}
{{- end -}}
{{- range $model := include "serve-app.models" $ | fromYamlArray -}}
{{- $path := ternary (printf "%s.pods" $model.at) "modelPods" (hasKey $model "pods") -}}
{{- $pods := include "serve-app.modelPods" (dict "root" $ "model" $model) | fromYaml -}}
{{- include "serve-app.lintPod" (dict "root" $ "path" $path "pods" $pods "whose" (printf " for %s" $model.at)) -}}
{{- end -}}
{{- end }}

{{- /* Args: root, path, pods (settings), whose (" for config.models[N]", or ""). */}}
{{- define "serve-app.lintPod" -}}
{{- $path := .path -}}{{- $pods := .pods -}}{{- $whose := .whose -}}
{{- range $name, $request := $pods.resources.requests -}}
{{- $limit := index ($pods.resources.limits | default dict) $name -}}
{{- if and $limit (gt (include "serve-app.quantity" $request | float64) (include "serve-app.quantity" $limit | float64)) -}}
{{- fail (printf "%s.resources.requests.%s is %v, but %s.resources.limits.%s is %v%s: Kubernetes would refuse the pod; raise the latter" $path $name $request $path $name $limit $whose) -}}
{{- end -}}
{{- end -}}
{{- range $label, $_ := $pods.podLabels -}}
{{- if regexMatch "^(app[.]kubernetes[.]io/(name|instance|component)$|(ray[.]io|serve-app)/)" $label -}}
{{- fail (printf "%s.podLabels has %s, by which Services, policies and budgets find the pods: remove it, or use another name" $path $label) -}}
{{- end -}}
{{- end -}}
{{- $bytes := .root.Values.objectStore.bytes -}}
{{- if and $pods.shmSize (gt (float64 $bytes) (include "serve-app.quantity" $pods.shmSize | float64)) -}}
{{- fail (printf "objectStore.bytes is %d, but %s.shmSize is %v%s: Ray would keep its objects on disk; raise the latter" (int64 $bytes) $path $pods.shmSize $whose) -}}
{{- end -}}
{{- end }}

{{- /* What values may not add to a container of Ray. Args: component, pods (their settings), env, mounts, volumes (the chart's, lists). */}}
{{- define "serve-app.lintAdditions" -}}
{{- $path := get (dict "head" "head" "ingress" "ingressPods" "model" "modelPods") .component -}}
{{- range .pods.extraEnv -}}
{{- if eq .name "NVIDIA_VISIBLE_DEVICES" -}}
{{- fail (printf "%s.extraEnv has NVIDIA_VISIBLE_DEVICES, but the device plugin sets it in pods of models with gpus_per_replica, and the chart to void in all others: remove it" $path) -}}
{{- end -}}
{{- end -}}
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
