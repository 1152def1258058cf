{{- define "serve-app.lintEdge" -}}
{{- $alb := eq (include "serve-app.alb" .) "true" -}}
{{- $in := .Values.ingress -}}
{{- if and $in.enabled (eq $in.className "alb") (not $in.alb) -}}
{{- list "alb-without-settings" "ingress.className is alb, but ingress.alb is false: the load balancer would get none of the settings that long streams need; set ingress.alb to true" | toJson | nindent 0 -}}
{{- end -}}
{{- if and $in.enabled $in.albCertificateArn (not $in.alb) -}}
{{- list "value-without-effect" (printf "ingress.albCertificateArn is %s, but ingress.alb is false: the certificate would not be used; set ingress.alb to true, or remove it" $in.albCertificateArn) | toJson | nindent 0 -}}
{{- end -}}
{{- if and $alb (eq $in.className "nginx") -}}
{{- list "alb-of-another-class" "ingress.alb is true, but ingress.className is nginx: set it to the class of the AWS controller, most often alb" | toJson | nindent 0 -}}
{{- end -}}
{{- range $name := list "healthcheck-interval-seconds" "unhealthy-threshold-count" -}}
{{- $given := get $in.annotations (printf "alb.ingress.kubernetes.io/%s" $name) -}}
{{- if not (regexMatch "^[0-9]*$" $given) -}}
{{- list "alb-check-not-a-number" (printf "ingress.annotations has alb.ingress.kubernetes.io/%s: %q, which is no number: write digits alone, for example %q" $name $given "10") | toJson | nindent 0 -}}
{{- end -}}
{{- end -}}
{{- if and $alb (not $in.albCertificateArn) (not $in.hosts) (not $in.tls) (not (hasKey $in.annotations "alb.ingress.kubernetes.io/certificate-arn")) (not (hasKey $in.annotations "alb.ingress.kubernetes.io/listen-ports")) -}}
{{- list "alb-without-certificate" "ingress.alb is true, but ingress.albCertificateArn and ingress.hosts are empty: the AWS controller finds a certificate by either and makes no load balancer without one; name the certificate, or the hosts of one in ACM" | toJson | nindent 0 -}}
{{- end -}}
{{- if and $in.tls $in.tlsSecretName -}}
{{- list "ingress-tls-twice" (printf "ingress.tlsSecretName is %s, but ingress.tls has %d entries, which take its place: remove one of the two" $in.tlsSecretName (len $in.tls)) | toJson | nindent 0 -}}
{{- end -}}
{{- if and $in.enabled $in.tlsSecretName (not $in.hosts) -}}
{{- list "ingress-tls-without-hosts" (printf "ingress.tlsSecretName is %s, but ingress.hosts is empty: controllers choose a certificate by the host; name the hosts" $in.tlsSecretName) | toJson | nindent 0 -}}
{{- end -}}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) -}}
{{- list "route-without-gateway" "httpRoute.enabled is true, but httpRoute.parentRefs is empty: no Gateway would take the route; name yours, for example [{name: gateway, namespace: gateways}]" | toJson | nindent 0 -}}
{{- end -}}
{{- $policies := .Values.networkPolicies -}}
{{- if and $policies.enabled $policies.clients (or $alb (eq .Values.service.type "LoadBalancer")) -}}
{{- $blocks := list -}}
{{- range $policies.clients }}{{ if .ipBlock }}{{ $blocks = append $blocks .ipBlock }}{{ end }}{{ end -}}
{{- if not $blocks -}}
{{- list "balancer-out-of-reach" (printf "%s, but networkPolicies.enabled is true and networkPolicies.clients has no ipBlock: the load balancer is no pod and could not reach the ingress; add {ipBlock: {cidr: ...}} of its subnets" (ternary "ingress.alb is true" "service.type is LoadBalancer" $alb)) | toJson | nindent 0 -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- /* Kinds of others that a cluster may lack. Only a cluster has them: `helm template` knows none of them, RayService included. */}}
{{- define "serve-app.lintKinds" -}}
{{- $has := .Capabilities.APIVersions -}}
{{- $rows := list
  (list "monitoring.podMonitors" .Values.monitoring.podMonitors "monitoring.coreos.com/v1/PodMonitor" "the Prometheus operator")
  (list "monitoring.prometheusRules" .Values.monitoring.prometheusRules "monitoring.coreos.com/v1/PrometheusRule" "the Prometheus operator")
  (list "httpRoute.enabled" .Values.httpRoute.enabled "gateway.networking.k8s.io/v1/HTTPRoute" "the Gateway API")
-}}
{{- if $has.Has "ray.io/v1/RayService" -}}
{{- range $rows -}}
{{- if and (index . 1) (not ($has.Has (index . 2))) -}}
{{- list "kind-missing" (printf "%s is true, but the cluster has no %s: install %s first, or set it to false" (index . 0) (index . 2) (index . 3)) | toJson | nindent 0 -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- /* What the world reaches asks for keys. */}}
{{- define "serve-app.lintOpen" -}}
{{- if not .Values.apiKeys.enabled -}}
{{- $given := get .Values.ingress.annotations "alb.ingress.kubernetes.io/scheme" -}}
{{- $scheme := $given | default (ternary .Values.ingress.albScheme "" .Values.ingress.alb) -}}
{{- if and .Values.ingress.enabled (eq $scheme "internet-facing") -}}
{{- list "open-to-everybody" (printf "%s is internet-facing, but apiKeys.enabled is false: anybody could use the models; enable the keys, or make it internal" (ternary "alb.ingress.kubernetes.io/scheme in ingress.annotations" "ingress.albScheme" (ne $given ""))) | toJson | nindent 0 -}}
{{- end -}}
{{- if and (eq .Values.service.type "LoadBalancer") (not .Values.service.loadBalancerSourceRanges) -}}
{{- list "open-to-everybody" "service.type is LoadBalancer, apiKeys.enabled is false and service.loadBalancerSourceRanges is empty: anybody could use the models; enable the keys, or name the ranges of your clients" | toJson | nindent 0 -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- /* Values that would do nothing, because another one is not set. */}}
{{- define "serve-app.lintEffect" -}}
{{- $redis := .Values.gcsFaultTolerance -}}
{{- $rows := list
  (list "gcsFaultTolerance.address" $redis.address "gcsFaultTolerance.enabled" $redis.enabled "Ray's head would not use it")
  (list "gcsFaultTolerance.existingSecret" $redis.existingSecret "gcsFaultTolerance.enabled" $redis.enabled "no Redis would use it")
  (list "gcsFaultTolerance.username" $redis.username "gcsFaultTolerance.address" $redis.address "the chart's own Redis has no users")
  (list "apiKeys.existingSecret" .Values.apiKeys.existingSecret "apiKeys.enabled" .Values.apiKeys.enabled "no client would be asked for a key")
  (list "tenants.existingSecret" .Values.tenants.existingSecret "apiKeys.enabled" .Values.apiKeys.enabled "no client would be asked for a key")
  (list "tenants.inline" (keys .Values.tenants.inline | sortAlpha | join ", ") "apiKeys.enabled" .Values.apiKeys.enabled "no client would be asked for a key")
  (list "batches.databaseSecret" .Values.batches.databaseSecret "config.ingress.batch.files"
    (((dig "ingress" "batch" dict .Values.config) | default dict).files | default "") "there would be no place for what the files hold")
  (list "weights.existingClaim" .Values.weights.existingClaim "weights.enabled" .Values.weights.enabled "no pod would mount it")
  (list "monitoring.prometheusRules" .Values.monitoring.prometheusRules "monitoring.podMonitors" .Values.monitoring.podMonitors
    "nothing would scrape what the alerts ask for, and ServeAppDown would fire for ever")
-}}
{{- range $rows -}}
{{- if and (index . 1) (not (index . 3)) -}}
{{- list "value-without-effect" (printf "%s is %v, but %s is %s: %s; set the latter, or remove the former" (index . 0) (index . 1) (index . 2) (toString (index . 3) | default "empty") (index . 4)) | toJson | nindent 0 -}}
{{- end -}}
{{- end -}}
{{- if and (eq (include "serve-app.keysFrom" .) "tenants") .Values.apiKeys.existingSecret -}}
{{- list "value-without-effect" (printf "apiKeys.existingSecret is %s, but there are tenants, whose keys alone count; remove it, or the tenants" .Values.apiKeys.existingSecret) | toJson | nindent 0 -}}
{{- end -}}
{{- if and .Values.tenants.existingSecret .Values.tenants.inline -}}
{{- list "value-without-effect" (printf "tenants.existingSecret is %s, but tenants.inline has tenants too, which nothing would read; remove one of them" .Values.tenants.existingSecret) | toJson | nindent 0 -}}
{{- end -}}
{{- if and .Values.service.loadBalancerSourceRanges (ne .Values.service.type "LoadBalancer") -}}
{{- list "value-without-effect" (printf "service.loadBalancerSourceRanges is %s, but service.type is %s: nothing would be kept out; use networkPolicies.clients, or set type to LoadBalancer" (join ", " .Values.service.loadBalancerSourceRanges) .Values.service.type) | toJson | nindent 0 -}}
{{- end -}}
{{- end }}

{{- /* The chart's own Redis goes with the values that ask for it, while the Ray cluster that keeps its state there runs on. */}}
{{- define "serve-app.lintRedis" -}}
{{- if and (eq (include "serve-app.ownRedis" .) "true") (eq .Values.gcsFaultTolerance.existingSecret (include "serve-app.redisName" .)) -}}
{{- list "redis-secret-of-chart" (printf "gcsFaultTolerance.existingSecret is %s, which the chart makes where the value is empty, and would delete now: give yours another name" .Values.gcsFaultTolerance.existingSecret) | toJson | nindent 0 -}}
{{- end -}}
{{- if contains ".serverless." .Values.gcsFaultTolerance.address -}}
{{- list "redis-serverless" (printf "gcsFaultTolerance.address is %s, but Ray cannot use ElastiCache Serverless, which has many shards (ray#44965): name a node-based one with one shard, or leave the address empty" .Values.gcsFaultTolerance.address) | toJson | nindent 0 -}}
{{- end -}}
{{- if .Capabilities.APIVersions.Has "ray.io/v1/RayService" -}}
{{- $live := lookup "ray.io/v1" "RayService" .Release.Namespace (include "serve-app.fullname" .) | default dict -}}
{{- $used := dig "spec" "rayClusterConfig" "gcsFaultToleranceOptions" "redisAddress" "" $live -}}
{{- $own := include "serve-app.ownRedisAddress" . -}}
{{- $held := dig "spec" "rayClusterConfig" "gcsFaultToleranceOptions" "redisPassword" "valueFrom" "secretKeyRef" "name" "" $live -}}
{{- $asked := .Values.gcsFaultTolerance.existingSecret | default (include "serve-app.redisName" .) -}}
{{- if and (eq $used $own) (eq (include "serve-app.ownRedis" .) "true") (ne $held $asked) -}}
{{- list "redis-in-use" (printf "the running Ray cluster has the password of Secret %s, and gcsFaultTolerance.existingSecret would give its Redis that of %s: copy the former into the latter and put redis-in-use into ignoredRules, or leave the Secret as it is" $held $asked) | toJson | nindent 0 -}}
{{- end -}}
{{- if and (eq $used $own) (ne (include "serve-app.ownRedis" .) "true") -}}
{{- list "redis-in-use" (printf "the running Ray cluster keeps its state in %s, but gcsFaultTolerance.enabled is %v and gcsFaultTolerance.address is %q: this upgrade would delete that Redis under it; install another release with these values and move the clients to it, or uninstall this one first" $own .Values.gcsFaultTolerance.enabled .Values.gcsFaultTolerance.address) | toJson | nindent 0 -}}
{{- end -}}
{{- end -}}
{{- end }}
