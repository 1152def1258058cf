{{- /* What the tables of files/lints/edge.yaml judge: load balancers, other operators' kinds, values without effect, Redis. Args of all:
in, as of serve-app.judge. */}}

{{- define "serve-app.lintAlb" -}}
{{- if eq (include "serve-app.alb" .root) "true" -}}
{{- $in := . -}}
{{- include "serve-app.judge" (dict "in" . "table" "albs" "drain" ((include "serve-app.timeouts" .root | fromYaml).drain | int)
    "idle" (int .root.Values.timeouts.loadBalancerIdleSeconds)) -}}
{{- range $name, $ours := include "serve-app.albAttributes" .root | fromYaml -}}
{{- $given := get $in.root.Values.ingress.annotations (printf "alb.ingress.kubernetes.io/%s" $name)
    | include "serve-app.attributesIn" | fromYaml -}}
{{- range $key, $way := dict "idle_timeout.timeout_seconds" "timeouts.loadBalancerIdleSeconds"
    "deregistration_delay.timeout_seconds" "config.timeouts.drain_s" -}}
{{- include "serve-app.judge" (dict "in" $in "table" "alb_attributes" "name" $name "key" $key "way" $way "given" $given "ours" $ours) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "serve-app.lintEdge" -}}
{{- $in := . -}}{{- $v := .root.Values -}}
{{- $blocks := list -}}
{{- range $v.networkPolicies.clients }}{{ if .ipBlock }}{{ $blocks = append $blocks .ipBlock }}{{ end }}{{ end -}}
{{- $is_alb := eq (include "serve-app.alb" .root) "true" -}}
{{- include "serve-app.judge" (dict "in" . "table" "edge" "ingress" $v.ingress "is_alb" $is_alb "blocks" $blocks) -}}
{{- range $name := list "healthcheck-interval-seconds" "unhealthy-threshold-count" -}}
{{- $given := get $v.ingress.annotations (printf "alb.ingress.kubernetes.io/%s" $name) -}}
{{- include "serve-app.judge" (dict "in" $in "table" "alb_checks" "name" $name "given" $given) -}}
{{- end -}}
{{- range $path, $hosts := dict "ingress.hosts" $v.ingress.hosts "httpRoute.hostnames" $v.httpRoute.hostnames -}}
{{- range $hosts }}{{ include "serve-app.judge" (dict "in" $in "table" "hosts" "path" $path "host" .) }}{{ end -}}
{{- end -}}
{{- $given := get $v.ingress.annotations "alb.ingress.kubernetes.io/scheme" -}}
{{- include "serve-app.judge" (dict "in" . "table" "open" "alb_scheme" ($given | default (ternary $v.ingress.albScheme "" $v.ingress.alb))
    "scheme_at" (ternary "alb.ingress.kubernetes.io/scheme in ingress.annotations" "ingress.albScheme" (ne $given ""))) -}}
{{- range $kind := .tables.kindsOfOthers -}}
{{- $given := include "serve-app.valueAt" (dict "values" $v "path" $kind.path) | fromJson -}}
{{- include "serve-app.judge" (dict "in" $in "table" "kinds" "has" $in.root.Capabilities.APIVersions "kind" $kind "given" $given.value) -}}
{{- end -}}
{{- end }}

{{- /* {"value": what is at a path with dots, or ""} as JSON. Args: values, path. */}}
{{- define "serve-app.valueAt" -}}
{{- $value := .values -}}
{{- range splitList "." .path }}{{ $value = get ($value | default dict) . }}{{ end -}}
{{ dict "value" $value | toJson }}
{{- end }}

{{- define "serve-app.lintEffect" -}}
{{- $in := . -}}{{- $v := .root.Values -}}
{{- range .tables.needs -}}
{{- $given := (include "serve-app.valueAt" (dict "values" $v "path" .path) | fromJson).value -}}
{{- if kindIs "map" $given }}{{ $given = keys $given | sortAlpha | join ", " }}{{ end -}}
{{- $needed := (include "serve-app.valueAt" (dict "values" $v "path" .needs) | fromJson).value -}}
{{- include "serve-app.judge" (dict "in" $in "table" "effect" "need" . "given" $given "needed" $needed) -}}
{{- end -}}
{{- include "serve-app.judge" (dict "in" . "table" "effects" "keys_from" (include "serve-app.keysFrom" .root)) -}}
{{- end }}

{{- define "serve-app.lintRedis" -}}
{{- $ft := .root.Values.gcsFaultTolerance -}}
{{- $name := include "serve-app.redisName" .root -}}
{{- $args := dict "in" . "ft" $ft "is_own" (eq (include "serve-app.ownRedis" .root) "true") "name" $name -}}
{{- include "serve-app.judge" (set $args "table" "redis") -}}
{{- if .root.Capabilities.APIVersions.Has "ray.io/v1/RayService" -}}
{{- $live := lookup "ray.io/v1" "RayService" .root.Release.Namespace (include "serve-app.fullname" .root) | default dict -}}
{{- $options := dig "spec" "rayClusterConfig" "gcsFaultToleranceOptions" dict $live -}}
{{- $found := dict "table" "redis_in_use" "used" (dig "redisAddress" "" $options) "address" (include "serve-app.ownRedisAddress" .root)
    "held" (dig "redisPassword" "valueFrom" "secretKeyRef" "name" "" $options) "asked" ($ft.existingSecret | default $name) -}}
{{- include "serve-app.judge" (merge $found $args) -}}
{{- end -}}
{{- end }}
