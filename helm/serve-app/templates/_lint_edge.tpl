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

{{- /* A phrase: whose keys have no limit of requests or tokens; "" where each has one, or where a Secret of yours has the tenants. */}}
{{- define "serve-app.unlimited" -}}
{{- if eq (include "serve-app.keysFrom" .) "api-keys" }}keys without tenants have no limits{{ end -}}
{{- $names := list -}}
{{- range $name, $tenant := .Values.tenants.inline -}}
{{- $limits := get ($tenant | default dict) "limits" | default dict -}}
{{- if not (keys (pick $limits "requests_per_minute" "tokens_per_minute" "tokens_per_day" "max_concurrent")) -}}
{{- $names = append $names $name -}}
{{- end -}}
{{- end -}}
{{- with $names }}tenants.inline.{{ sortAlpha . | join " and tenants.inline." }} has no limits{{ end -}}
{{- end }}

{{- define "serve-app.lintEdge" -}}
{{- $in := . -}}{{- $v := .root.Values -}}
{{- $blocks := list -}}
{{- range $v.networkPolicies.clients }}{{ if .ipBlock }}{{ $blocks = append $blocks .ipBlock }}{{ end }}{{ end -}}
{{- $vpc := "^(0|10|192[.]168|172[.](1[6-9]|2[0-9]|3[01])|100[.](6[4-9]|[7-9][0-9]|1[01][0-9]|12[0-7]))[.]|:" -}}
{{- $private := false -}}{{- /* RFC 1918 and 6598, of which VPCs are made, and 0.0.0.0/0 */ -}}
{{- range $blocks }}{{ $private = or $private (regexMatch $vpc (.cidr | default "")) }}{{ end -}}
{{- $is_alb := eq (include "serve-app.alb" .root) "true" -}}
{{- $of := "alb.ingress.kubernetes.io/" -}}
{{- $has_groups := hasKey $v.ingress.annotations (printf "%ssecurity-groups" $of) -}}
{{- $key := printf "%sinbound-cidrs" $of -}}
{{- $cidrs := list -}}
{{- range get $v.ingress.annotations $key | splitList "," }}{{ with trim . }}{{ $cidrs = append $cidrs . }}{{ end }}{{ end -}}
{{- $same := list -}}{{- /* 0.0.0.0/0 has the subnets too, wherever the clients are */ -}}
{{- range $blocks }}{{ if has .cidr (without $cidrs "0.0.0.0/0") }}{{ $same = append $same .cidr }}{{ end }}{{ end -}}
{{- include "serve-app.judge" (dict "in" . "table" "edge" "ingress" $v.ingress "is_alb" $is_alb "blocks" $blocks "private" $private
    "same" $same) -}}
{{- $networks := dict (printf "ingress.annotations with %s" $key) $cidrs -}}
{{- range $name := list "clients" "dns" -}}
{{- $found := list -}}
{{- range get $v.networkPolicies $name }}{{ with .ipBlock }}{{ with .cidr }}{{ $found = append $found . }}{{ end }}{{ end }}{{ end -}}
{{- $_ := set $networks (printf "networkPolicies.%s" $name) $found -}}
{{- end -}}
{{- range $at, $all := $networks -}}
{{- range $all -}}
{{- include "serve-app.judge" (dict "in" $in "table" "cidrs" "at" $at "cidr" . "network" $in.shared.network) -}}
{{- end -}}
{{- end -}}
{{- include "serve-app.judge" (dict "in" . "table" "inbound" "key" $key "cidrs" $cidrs "has_groups" $has_groups) -}}
{{- $is_narrow := or $has_groups (hasKey $v.ingress.annotations (printf "%ssecurity-group-prefix-lists" $of)) -}}
{{- if and $cidrs (not $has_groups) }}{{ $is_narrow = not (or (has "0.0.0.0/0" $cidrs) (has "::/0" $cidrs)) }}{{ end -}}
{{- range $name := list "healthcheck-interval-seconds" "unhealthy-threshold-count" -}}
{{- $given := get $v.ingress.annotations (printf "alb.ingress.kubernetes.io/%s" $name) -}}
{{- include "serve-app.judge" (dict "in" $in "table" "alb_checks" "name" $name "given" $given) -}}
{{- end -}}
{{- range $path, $hosts := dict "ingress.hosts" $v.ingress.hosts "httpRoute.hostnames" $v.httpRoute.hostnames -}}
{{- range $hosts }}{{ include "serve-app.judge" (dict "in" $in "table" "hosts" "path" $path "host" .) }}{{ end -}}
{{- end -}}
{{- $given := get $v.ingress.annotations "alb.ingress.kubernetes.io/scheme" -}}
{{- include "serve-app.judge" (dict "in" . "table" "open" "alb_scheme" ($given | default (ternary $v.ingress.albScheme "" $v.ingress.alb))
    "scheme_at" (ternary "alb.ingress.kubernetes.io/scheme in ingress.annotations" "ingress.albScheme" (ne $given ""))
    "is_narrow" $is_narrow "unlimited" (include "serve-app.unlimited" .root)) -}}
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
{{- $vain := list -}}
{{- range $path := list "nodeSelector" "tolerations" "podLabels" "persistence.storageClass" -}}{{- /* empty in values.yaml */ -}}
{{- if (include "serve-app.valueAt" (dict "values" $ft.redis "path" $path) | fromJson).value }}{{ $vain = append $vain $path }}{{ end -}}
{{- end -}}
{{- $args := dict "in" . "ft" $ft "vain" $vain "is_own" (eq (include "serve-app.ownRedis" .root) "true") "name" $name -}}
{{- include "serve-app.judge" (set $args "table" "redis") -}}
{{- if .root.Capabilities.APIVersions.Has "ray.io/v1/RayService" -}}
{{- $live := lookup "ray.io/v1" "RayService" .root.Release.Namespace (include "serve-app.fullname" .root) | default dict -}}
{{- $options := dig "spec" "rayClusterConfig" "gcsFaultToleranceOptions" dict $live -}}
{{- $found := dict "table" "redis_in_use" "used" (dig "redisAddress" "" $options) "address" (include "serve-app.ownRedisAddress" .root)
    "held" (dig "redisPassword" "valueFrom" "secretKeyRef" "name" "" $options) "asked" ($ft.existingSecret | default $name) -}}
{{- include "serve-app.judge" (merge $found $args) -}}
{{- end -}}
{{- end }}
