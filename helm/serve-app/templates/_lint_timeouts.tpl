{{- /* What values fix of the quantities that files/rules.yaml names: each where it is set, and its seconds. A quantity without an override
is named with the value of which the chart makes it. */}}
{{- define "serve-app.knownTimeouts" -}}
{{- $t := include "serve-app.timeouts" . | fromYaml -}}
{{- $v := .Values.timeouts -}}
{{- $c := .Values.config -}}
{{- $at := dict -}}
{{- range $name := list "rayDrainSeconds" "terminationGracePeriodSeconds" "rayClusterDeletionDelaySeconds" "gcsReconnectSeconds" -}}
{{- $_ := set $at $name (ternary (printf "timeouts.overrides.%s" $name) (printf "%s (of config.timeouts.drain_s)" $name) (gt (get $v.overrides $name | int) 0)) -}}
{{- end }}
drain_s: {at: config.timeouts.drain_s, s: {{ $c.timeouts.drain_s }}}
unready_s: {at: config.ingress.unready_s, s: {{ $c.ingress.unready_s }}}
no_replica_s: {at: config.timeouts.no_replica_s, s: {{ $c.timeouts.no_replica_s }}}
keep_alive_s: {at: config.ingress.keep_alive_s, s: {{ $c.ingress.keep_alive_s }}}
prefill_s: {at: timeouts.prefillSeconds, s: {{ $v.prefillSeconds }}}
serve_shutdown_s: {at: Serve's graceful_shutdown_timeout_s, s: {{ $t.serve }}}
client_s: {at: timeouts.clientSeconds, s: {{ $v.clientSeconds }}}
load_balancer_idle_s: {at: timeouts.loadBalancerIdleSeconds, s: {{ $v.loadBalancerIdleSeconds }}}
node_drain_s: {at: {{ $at.rayDrainSeconds }}, s: {{ $t.rayDrain }}}
pod_grace_s: {at: {{ $at.terminationGracePeriodSeconds }}, s: {{ $t.grace }}}
prestop_s: {at: timeouts.preStopSleepSeconds, s: {{ $v.preStopSleepSeconds }}}
head_prestop_s: {at: head.preStopSleepSeconds, s: {{ .Values.head.preStopSleepSeconds }}}
probe_s: {at: the readiness probe's periods, s: 4}
old_cluster_s: {at: {{ $at.rayClusterDeletionDelaySeconds }}, s: {{ $t.deletionDelay }}}
gcs_reconnect_s: {at: {{ $at.gcsReconnectSeconds }}, s: {{ $t.gcsReconnect }}}
{{- with int $v.nodeDrainSeconds }}
node_grace_s: {at: timeouts.nodeDrainSeconds, s: {{ . }}}
{{- end }}
{{- if eq (include "serve-app.alb" .) "true" }}
health_check_s: {at: the load balancer's health check, s: {{ include "serve-app.albHealthCheckSeconds" . }}}
{{- end }}
{{- if .Values.ingressPods.spot }}
spot_notice_s: {at: ingressPods.spotNoticeSeconds, s: {{ .Values.ingressPods.spotNoticeSeconds }}}
{{- end }}
{{- end }}

{{- /* The rules of serve-app check: `longer` is at least the sum of `shorter` and `margin_s`. A quantity that is not known is not judged. A
quantity that a broken rule needs larger counts as that large in the rules after it, so that one refusal names the whole chain; those that
the chart makes of others (`follows`, without an override) grow with them, and are judged as they are.
Args: in, as of serve-app.judge. */}}
{{- define "serve-app.lintTimeouts" -}}
{{- $root := .root -}}
{{- $needed := dict -}}
{{- $known := include "serve-app.knownTimeouts" $root | fromYaml -}}
{{- range $rule := .shared.timeouts -}}
{{- $longer := get $known $rule.longer -}}
{{- $follows := and $rule.follows (not (hasPrefix "timeouts.overrides." (dig "at" "" $longer))) -}}
{{- $least := $rule.margin_s -}}
{{- $grown := 0.0 -}}
{{- $others := list -}}
{{- range $rule.shorter -}}
{{- with get $known . -}}
{{- $grown = addf $grown (subf (get $needed .at | default .s) .s) -}}
{{- $must := and (not $follows) (get $needed .at) -}}
{{- $s := $must | default .s -}}
{{- $least = addf $least $s -}}
{{- $others = append $others (printf "%s %s %s" .at (ternary "must be" "is" (not (empty $must))) (include "serve-app.seconds" $s)) -}}
{{- end -}}
{{- end -}}
{{- if and $longer (eq (len $others) (len $rule.shorter)) -}}
{{- $counts := not (has $rule.name $root.Values.ignoredRules) -}}
{{- if and $follows $counts $grown -}}
{{- $_ := set $needed $longer.at (addf $longer.s $grown) -}}
{{- end -}}
{{- if lt (float64 $longer.s) (float64 $least) -}}
{{- $is := printf "%s is %s and %s" $longer.at (include "serve-app.seconds" $longer.s) (join " and " $others) -}}
{{- $way := $rule.way_out | default (printf "%s or more is needed" (include "serve-app.seconds" $least)) -}}
{{- list $rule.name (printf "%s: %s; %s" $is $rule.reason $way) | toJson | nindent 0 -}}
{{- if and $counts (not $follows) -}}
{{- $_ := set $needed $longer.at (maxf (get $needed $longer.at | default 0) $least) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- /* Without an exponent, which Go gives to a million. */}}
{{- define "serve-app.seconds" -}}
{{ if eq (float64 .) (floor .) }}{{ int64 . }}{{ else }}{{ . }}{{ end }}
{{- end }}
