{{- /* A file with what takes the place of ${NAME} in it; tools/monitoring/facts.py does the same. Args: root, text. */}}
{{- define "serve-app.filled" -}}
{{- $m := .root.Values.monitoring -}}
{{- $name := include "serve-app.fullname" .root -}}
{{- $namespace := .root.Release.Namespace -}}
{{- $facts := dict
  "availability" (toString $m.slo.availability)
  "ttft_objective" (toString $m.slo.ttft.objective)
  "ttft_s" (toString $m.slo.ttft.seconds)
  "itl_objective" (toString $m.slo.itl.objective)
  "itl_s" (toString $m.slo.itl.seconds)
  "min_requests" (int64 $m.slo.minRequests | toString)
  "waiting" (int64 $m.waitingRequestsAlert | toString)
  "free_bytes" (int64 $m.freeBytesAlert | toString)
  "drain_limit_s" (add 300 (include "serve-app.timeouts" .root | fromYaml).drain | toString)
  "runbook" $m.runbookUrl
  "grafana" (trimSuffix "/" $m.grafanaUrl)
  "job" (printf "%s/%s-ingress" $namespace $name)
  "namespace" $namespace
  "release" $name
  "uid" (include "serve-app.dashboardUid" .root) -}}
{{- $text := .text -}}
{{- range $key, $value := $facts }}{{ $text = replace (printf "${%s}" $key) $value $text }}{{ end -}}
{{- $text -}}
{{- end }}

{{- /* What the uids of this release's dashboards begin with: of two dashboards with one uid, Grafana shows the last. With the name of a
dashboard behind it, a uid is within Grafana's limit of 40 characters. */}}
{{- define "serve-app.dashboardUid" -}}
serve-app-{{ printf "%s/%s" .Release.Namespace (include "serve-app.fullname" .) | sha256sum | trunc 16 }}
{{- end }}
