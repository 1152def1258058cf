{{- /* What values fix of the quantities that files/rules.yaml names: each where it is set, and its whole seconds. */}}
{{- define "serve-app.knownTimeouts" -}}
{{- $t := include "serve-app.timeouts" . | fromYaml -}}
{{- $v := .Values.timeouts -}}
drain_s: {at: config.timeouts.drain_s, s: {{ $t.drain }}}
unready_s: {at: config.ingress.unready_s, s: {{ $t.unready }}}
no_replica_s: {at: config.timeouts.no_replica_s, s: {{ $t.noReplica }}}
keep_alive_s: {at: config.ingress.keep_alive_s, s: {{ $t.keepAlive }}}
prefill_s: {at: timeouts.prefillSeconds, s: {{ $v.prefillSeconds }}}
serve_shutdown_s: {at: Serve's graceful_shutdown_timeout_s, s: {{ $t.serve }}}
client_s: {at: timeouts.clientSeconds, s: {{ $v.clientSeconds }}}
load_balancer_idle_s: {at: timeouts.loadBalancerIdleSeconds, s: {{ $v.loadBalancerIdleSeconds }}}
node_drain_s: {at: timeouts.rayDrainSeconds, s: {{ $t.rayDrain }}}
pod_grace_s: {at: timeouts.terminationGracePeriodSeconds, s: {{ $t.grace }}}
prestop_s: {at: timeouts.preStopSleepSeconds, s: {{ $v.preStopSleepSeconds }}}
head_prestop_s: {at: head.preStopSleepSeconds, s: {{ .Values.head.preStopSleepSeconds }}}
probe_s: {at: the readiness probe's periods, s: 4}
old_cluster_s: {at: timeouts.rayClusterDeletionDelaySeconds, s: {{ $t.deletionDelay }}}
gcs_reconnect_s: {at: timeouts.gcsReconnectSeconds, s: {{ $t.gcsReconnect }}}
{{- if eq (include "serve-app.alb" .) "true" }}
health_check_s: {at: the load balancer's health check, s: {{ include "serve-app.albHealthCheckSeconds" . }}}
{{- end }}
{{- if .Values.ingressPods.spot }}
spot_notice_s: {at: ingressPods.spotNoticeSeconds, s: {{ .Values.ingressPods.spotNoticeSeconds }}}
{{- end }}
{{- end }}

{{- /* The rules of serve-app check: `longer` is at least the sum of `shorter` and `margin_s`. A quantity that is not known is not judged. */}}
{{- define "serve-app.lintTimeouts" -}}
{{- $known := include "serve-app.knownTimeouts" . | fromYaml -}}
{{- range $rule := (.Files.Get "files/rules.yaml" | fromYaml).timeouts -}}
{{- $least := int $rule.margin_s -}}
{{- $others := list -}}
{{- range $rule.shorter -}}
{{- with get $known . -}}
{{- $least = add $least .s | int -}}
{{- $others = append $others (printf "%s is %v" .at .s) -}}
{{- end -}}
{{- end -}}
{{- $longer := get $known $rule.longer -}}
{{- if and $longer (eq (len $others) (len $rule.shorter)) -}}
{{- if lt (int $longer.s) $least -}}
{{- list $rule.name (printf "%s is %v and %s: %s; %d or more is needed" $longer.at $longer.s (join " and " $others) $rule.reason $least) | toJson | nindent 0 -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}
