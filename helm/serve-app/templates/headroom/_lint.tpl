{{- /* Headroom pods that no model pod could preempt. */}}
{{- define "serve-app.lintHeadroom" -}}
{{- range $model := include "serve-app.models" . | fromYamlArray -}}
{{- $pods := include "serve-app.modelPods" (dict "root" $ "model" $model) | fromYaml -}}
{{- $class := $pods.headroom.priorityClassName -}}
{{- if and $pods.headroom.pods (not $class) (not $.Values.priorityClasses.create) -}}
{{- list "headroom-is-never-preempted" (printf "modelPods.headroom.pods is %v for %s, but headroom.priorityClassName is empty and priorityClasses.create is false: the pods would not give way to the model's; name a class of a negative value, or set priorityClasses.create to true" $pods.headroom.pods $model.at) | toJson | nindent 0 -}}
{{- end -}}
{{- if and $pods.headroom.pods $class (eq $class $pods.priorityClassName) -}}
{{- list "headroom-is-never-preempted" (printf "modelPods.headroom.priorityClassName is %s for %s, and so is modelPods.priorityClassName: pods give way to a higher priority alone; name a class of a lower value" $class $model.at) | toJson | nindent 0 -}}
{{- end -}}
{{- end -}}
{{- end }}
