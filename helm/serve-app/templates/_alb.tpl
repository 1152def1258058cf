{{- /* An AWS load balancer by this chart, as "true" or "false". */}}
{{- define "serve-app.alb" -}}
{{ and .Values.ingress.enabled .Values.ingress.alb }}
{{- end }}

{{- /* How an AWS load balancer learns that an ingress stops. The timeout must be below the interval, whose least is 5 s. */}}
{{- define "serve-app.albHealthCheck" -}}
alb.ingress.kubernetes.io/healthcheck-path: /readyz
alb.ingress.kubernetes.io/healthcheck-interval-seconds: "5"
alb.ingress.kubernetes.io/healthcheck-timeout-seconds: "2"
alb.ingress.kubernetes.io/healthy-threshold-count: "2"
alb.ingress.kubernetes.io/unhealthy-threshold-count: "2"
{{- end }}

{{- /* Seconds until an AWS load balancer turns away from an ingress that says it stops. */}}
{{- define "serve-app.albHealthCheckSeconds" -}}
{{- $check := mergeOverwrite (include "serve-app.albHealthCheck" . | fromYaml) .Values.ingress.annotations -}}
{{- mul (index $check "alb.ingress.kubernetes.io/healthcheck-interval-seconds") (index $check "alb.ingress.kubernetes.io/unhealthy-threshold-count") -}}
{{- end }}

{{- /* What an AWS load balancer and its target group must know of the chart's timeouts, and how it chooses a target. */}}
{{- define "serve-app.albAttributes" -}}
load-balancer-attributes: {idle_timeout.timeout_seconds: "{{ .Values.timeouts.loadBalancerIdleSeconds }}"}
target-group-attributes:
  deregistration_delay.timeout_seconds: "{{ (include "serve-app.timeouts" . | fromYaml).drain }}"
  load_balancing.algorithm.type: least_outstanding_requests
{{- end }}

{{- /* Attributes `key=value,...` as YAML. */}}
{{- define "serve-app.attributesIn" -}}
{{- $found := dict -}}
{{- range splitList "," . -}}
{{- $pair := splitList "=" (trim .) -}}
{{- with trim (first $pair) }}{{ $_ := set $found . (rest $pair | join "=" | trim) }}{{ end -}}
{{- end -}}
{{ toYaml $found }}
{{- end }}

{{- /* Timeouts of an AWS load balancer. */}}
{{- define "serve-app.lintAlb" -}}
{{- if eq (include "serve-app.alb" .) "true" -}}
{{- $drain := (include "serve-app.timeouts" . | fromYaml).drain | int -}}
{{- $idle := .Values.timeouts.loadBalancerIdleSeconds | int -}}
{{- if gt $drain 3600 -}}
{{- list "alb-cuts-drain" (printf "config.timeouts.drain_s is %d, but ingress.alb is true and an AWS load balancer keeps a stopping target for 3600 s at most: it would cut streams; lower drain_s, or use another load balancer" $drain) | toJson | nindent 0 -}}
{{- end -}}
{{- if gt $idle 4000 -}}
{{- list "alb-cuts-silence" (printf "timeouts.loadBalancerIdleSeconds is %d, but ingress.alb is true and an AWS load balancer waits 4000 s at most: lower it, or use another load balancer" $idle) | toJson | nindent 0 -}}
{{- end -}}
{{- range $name, $ours := include "serve-app.albAttributes" . | fromYaml -}}
{{- $given := get $.Values.ingress.annotations (printf "alb.ingress.kubernetes.io/%s" $name) | include "serve-app.attributesIn" | fromYaml -}}
{{- range $key, $way := dict "idle_timeout.timeout_seconds" "timeouts.loadBalancerIdleSeconds" "deregistration_delay.timeout_seconds" "config.timeouts.drain_s" -}}
{{- if and (hasKey $given $key) (hasKey $ours $key) (ne (get $given $key) (get $ours $key)) -}}
{{- list "alb-timeout-twice" (printf "ingress.annotations has alb.ingress.kubernetes.io/%s with %s=%s, but %s makes it %s: the load balancer would cut streams, or outlast them; remove the former, and set the latter" $name $key (get $given $key) $way (get $ours $key)) | toJson | nindent 0 -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}
