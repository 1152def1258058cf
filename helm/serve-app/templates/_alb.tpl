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
