{{- /* A quantity of Kubernetes as a number. */}}
{{- define "loadtest.quantity" -}}
{{- $number := regexFind "^[0-9.]+(e[+][0-9]+)?" (toString .) -}}
{{- $units := dict "" 1 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{ mulf $number (index $units (trimPrefix $number (toString .))) }}
{{- end }}

{{- define "loadtest.lintPods" -}}
{{- range $path, $pods := dict "master" .Values.master "workers" .Values.workers "results.s3" .Values.results.s3 "report" .Values.report "test" .Values.test -}}
{{- range $name, $request := $pods.resources.requests -}}
{{- $limit := index ($pods.resources.limits | default dict) $name -}}
{{- if and $limit (gt (include "loadtest.quantity" $request | float64) (include "loadtest.quantity" $limit | float64)) -}}
{{- fail (printf "%s.resources.requests.%s is %v, but %s.resources.limits.%s is %v: Kubernetes would refuse the pod; raise the latter" $path $name $request $path $name $limit) -}}
{{- end -}}
{{- end -}}
{{- range $label, $_ := $pods.podLabels -}}
{{- if regexMatch "^(app[.]kubernetes[.]io/(name|instance|component)|loadtest/run)$" $label -}}
{{- fail (printf "%s.podLabels has %s, by which Services and policies find the pods: remove it, or use another name" $path $label) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- /* What values may not add to master and workers: names that are taken. The chart's own are those of all its pods together. */}}
{{- define "loadtest.lintAdditions" -}}
{{- $mounts := list "/tmp" "/results" "/etc/loadtest/scenario" "/etc/loadtest/api-key" "/var/run/secrets/kubernetes.io/serviceaccount" -}}
{{- range list (list "extraEnv" "name" (list "HOME" "POD_NAME" "TARGET_URL"))
  (list "extraVolumes" "name" (list "tmp" "scenario" "results" "api-key" "kube-api-access"))
  (list "extraVolumeMounts" "mountPath" $mounts) -}}
{{- $where := index . 0 -}}{{- $key := index . 1 -}}{{- $taken := index . 2 -}}
{{- range index $.Values $where -}}
{{- if has (index . $key) $taken -}}
{{- fail (printf "%s has the %s %s, which the chart uses itself, or which is there twice: remove it, or choose another" $where $key (index . $key)) -}}
{{- end -}}
{{- $taken = append $taken (index . $key) -}}
{{- end -}}
{{- end -}}
{{- $names := list -}}
{{- range .Values.extraVolumes }}{{ $names = append $names .name }}{{ end -}}
{{- range .Values.extraVolumeMounts -}}
{{- if not (has .name $names) -}}
{{- fail (printf "extraVolumeMounts mounts %s at %s, but extraVolumes has no volume of that name: add it there" .name .mountPath) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- /* Values that would do nothing, because another one is not set. */}}
{{- define "loadtest.lintEffect" -}}
{{- $r := .Values.results -}}
{{- range list
  (list "results.persistence.existingClaim" $r.persistence.existingClaim "results.persistence.enabled" $r.persistence.enabled)
  (list "results.s3.endpoint" $r.s3.endpoint "results.s3.uri" $r.s3.uri)
  (list "results.s3.region" $r.s3.region "results.s3.uri" $r.s3.uri) -}}
{{- if and (index . 1) (not (index . 3)) -}}
{{- fail (printf "%s is %v, but %s is %s: nothing would go there; set the latter, or remove the former" (index . 0) (index . 1) (index . 2) (toString (index . 3) | default "empty")) -}}
{{- end -}}
{{- end -}}
{{- end }}
