{{- /* The rules of serve_app/config/timeouts.py under the same names: `longer` is at least the sum of `shorter` and `margin`. */}}
{{- define "serve-app.timeoutRules" -}}
{{- $t := include "serve-app.timeouts" . | fromYaml -}}
{{- $v := .Values.timeouts -}}
{{- $drain := dict "config.timeouts.drain_s" $t.drain -}}
{{- $unready := dict "config.ingress.unready_s" $t.unready -}}
{{- $wait := dict "config.timeouts.no_replica_s" $t.noReplica -}}
{{- $serve := dict "Serve's graceful_shutdown_timeout_s" $t.serve -}}
{{- $idle := dict "timeouts.loadBalancerIdleSeconds" (int $v.loadBalancerIdleSeconds) -}}
{{- $node := dict "timeouts.rayDrainSeconds" $t.rayDrain -}}
{{- $rules := list
  (list "drain-outlasts-wait" $drain $wait 0 "a stopping ingress would cut requests that still wait for a replica")
  (list "client-outlasts-drain" (dict "timeouts.clientSeconds" (int $v.clientSeconds)) $drain 0
    "clients would give up answers that are still being made")
  (list "load-balancer-outlasts-silence" $idle (merge (dict "timeouts.prefillSeconds" (int $v.prefillSeconds)) $wait) 0
    "the load balancer would cut requests without stream, which are silent while they wait for a replica and their prefill")
  (list "keep-alive-outlasts-load-balancer" (dict "config.ingress.keep_alive_s" $t.keepAlive) $idle 1
    "the load balancer would send requests into connections that the ingress is closing, and answer 502")
  (list "unready-outlasts-probe" $unready (dict "the readiness probe's periods" 4) 1
    "a stopping ingress would refuse requests before the Service has turned away")
  (list "node-drain-outlasts-serve" $node $serve 0 "Ray would end the node under replicas that are draining")
  (list "pod-grace-outlasts-node-drain" (dict "timeouts.terminationGracePeriodSeconds" $t.grace)
    (merge (dict "timeouts.preStopSleepSeconds" (int $v.preStopSleepSeconds)) $node) 10
    "Kubernetes would kill the pod while its node is draining")
  (list "old-cluster-outlasts-drain" (dict "timeouts.rayClusterDeletionDelaySeconds" $t.deletionDelay) $drain 60
    "an upgrade would delete the old cluster under its streams")
  (list "gcs-reconnect-outlasts-drain" (dict "timeouts.gcsReconnectSeconds" $t.gcsReconnect) $drain 1
    "workers would end under their streams when the old cluster's head has gone")
  (list "head-outlasts-worker-sleep" (dict "head.preStopSleepSeconds" (int .Values.head.preStopSleepSeconds))
    (dict "timeouts.preStopSleepSeconds" (int $v.preStopSleepSeconds)) 15
    "the head of a deleted cluster would go before its workers have announced their drain")
-}}
{{- if eq (include "serve-app.alb" .) "true" -}}
{{- $rules = append $rules (list "unready-outlasts-health-check" $unready
  (dict "the load balancer's health check" (include "serve-app.albHealthCheckSeconds" . | int)) 2
  "a stopping ingress would refuse requests that the load balancer still sends, which answers 502") -}}
{{- end -}}
{{- if .Values.ingressPods.spot -}}
{{- $rules = append $rules (list "spot-notice-outlasts-drain"
  (dict "ingressPods.spotNoticeSeconds" (int .Values.ingressPods.spotNoticeSeconds)) (merge (dict) $unready $drain) 0
  "the node would go under the streams of its ingress; put ingresses on on-demand nodes with ingressPods.spot=false") -}}
{{- end -}}
{{ toYaml $rules }}
{{- end }}

{{- define "serve-app.lintTimeouts" -}}
{{- range include "serve-app.timeoutRules" . | fromYamlArray -}}
{{- $longer := index . 1 -}}
{{- $least := int (index . 3) -}}
{{- $others := list -}}
{{- range $name, $seconds := index . 2 -}}
{{- $least = add $least $seconds | int -}}
{{- $others = append $others (printf "%s is %v" $name $seconds) -}}
{{- end -}}
{{- $name := keys $longer | first -}}
{{- if lt (index $longer $name | int) $least -}}
{{- fail (printf "%s: %s is %v and %s: %s; %d or more is needed" (index . 0) $name (index $longer $name) (join " and " $others) (index . 4) $least) -}}
{{- end -}}
{{- end -}}
{{- end }}
