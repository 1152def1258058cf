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

{{- define "serve-app.lintEdge" -}}
{{- $drain := (include "serve-app.timeouts" . | fromYaml).drain | int -}}
{{- $idle := .Values.timeouts.loadBalancerIdleSeconds | int -}}
{{- $alb := eq (include "serve-app.alb" .) "true" -}}
{{- if and $alb (gt $drain 3600) -}}
{{- fail (printf "config.timeouts.drain_s is %d, but ingress.alb is true and an AWS load balancer keeps a stopping target for 3600 s at most: it would cut streams; lower drain_s, or use another load balancer" $drain) -}}
{{- end -}}
{{- if and $alb (gt $idle 4000) -}}
{{- fail (printf "timeouts.loadBalancerIdleSeconds is %d, but ingress.alb is true and an AWS load balancer waits 4000 s at most: lower it, or use another load balancer" $idle) -}}
{{- end -}}
{{- $in := .Values.ingress -}}
{{- if and $in.enabled (eq $in.className "alb") (not $in.alb) -}}
{{- fail "ingress.className is alb, but ingress.alb is false: the load balancer would get none of the settings that long streams need; set ingress.alb to true" -}}
{{- end -}}
{{- if and $in.enabled $in.albCertificateArn (not $in.alb) -}}
{{- fail (printf "ingress.albCertificateArn is %s, but ingress.alb is false: the certificate would not be used; set ingress.alb to true, or remove it" $in.albCertificateArn) -}}
{{- end -}}
{{- if and $alb (eq $in.className "nginx") -}}
{{- fail "ingress.alb is true, but ingress.className is nginx: set it to the class of the AWS controller, most often alb" -}}
{{- end -}}
{{- if and $alb (eq $in.albScheme "internet-facing") (not .Values.apiKeys.enabled) -}}
{{- fail "ingress.albScheme is internet-facing, but apiKeys.enabled is false: anybody could use the models; enable the keys, or set albScheme to internal" -}}
{{- end -}}
{{- $policies := .Values.networkPolicies -}}
{{- if and $policies.enabled $policies.clients (or $alb (eq .Values.service.type "LoadBalancer")) -}}
{{- $blocks := list -}}
{{- range $policies.clients }}{{ if .ipBlock }}{{ $blocks = append $blocks .ipBlock }}{{ end }}{{ end -}}
{{- if not $blocks -}}
{{- fail (printf "%s, but networkPolicies.enabled is true and networkPolicies.clients has no ipBlock: the load balancer is no pod and could not reach the ingress; add {ipBlock: {cidr: ...}} of its subnets" (ternary "ingress.alb is true" "service.type is LoadBalancer" $alb)) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- /* The chart's own Redis goes with the values that ask for it, while the Ray cluster that keeps its state there runs on. */}}
{{- define "serve-app.lintRedis" -}}
{{- if .Capabilities.APIVersions.Has "ray.io/v1/RayService" -}}
{{- $live := lookup "ray.io/v1" "RayService" .Release.Namespace .Release.Name | default dict -}}
{{- $used := dig "spec" "rayClusterConfig" "gcsFaultToleranceOptions" "redisAddress" "" $live -}}
{{- $own := include "serve-app.ownRedisAddress" . -}}
{{- if and (eq $used $own) (ne (include "serve-app.ownRedis" .) "true") -}}
{{- fail (printf "the running Ray cluster keeps its state in %s, but gcsFaultTolerance.enabled is %v and gcsFaultTolerance.address is %q: this upgrade would delete that Redis under it; install another release with these values and move the clients to it, or uninstall this one first" $own .Values.gcsFaultTolerance.enabled .Values.gcsFaultTolerance.address) -}}
{{- end -}}
{{- end -}}
{{- end }}
