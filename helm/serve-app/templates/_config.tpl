{{- /* Where the keys of clients come from: "tenants", "api-keys", or "" where no key is needed. */}}
{{- define "serve-app.keysFrom" -}}
{{- if .Values.apiKeys.enabled -}}
{{ ternary "tenants" "api-keys" (or (ne .Values.tenants.existingSecret "") (not (empty .Values.tenants.inline))) }}
{{- end -}}
{{- end }}

{{- /* Not empty where `helm test` has a key to ask with, or needs none. */}}
{{- define "serve-app.hasTest" -}}
{{ if or (ne (include "serve-app.keysFrom" .) "tenants") .Values.test.apiKeySecret }}true{{ end }}
{{- end }}

{{- define "serve-app.tenantsSecret" -}}
{{ .Values.tenants.existingSecret | default (printf "%s-tenants" (include "serve-app.fullname" .)) }}
{{- end }}

{{- /* The tenants of the values, as the key of a Secret. */}}
{{- define "serve-app.inlineTenants" -}}
tenants.yaml: {{ toYaml (dict "tenants" .Values.tenants.inline) | quote }}
{{- end }}

{{- /* The configuration with what the cluster dictates. `serve-app.lint` has refused contradictions. */}}
{{- define "serve-app.config" -}}
{{- $config := deepCopy .Values.config -}}
{{- $_ := set $config "name" (include "serve-app.fullname" .) -}}
{{- $ingress := $config.ingress | default dict -}}
{{- $_ := set $ingress "host" "0.0.0.0" -}}
{{- $_ := set $ingress "resources" (dict "serve_app_ingress" 1) -}}
{{- $keysFrom := include "serve-app.keysFrom" . -}}
{{- if eq $keysFrom "tenants" -}}
{{- $_ := set $ingress "tenants_file" "/etc/serve-app/tenants/tenants.yaml" -}}
{{- else if eq $keysFrom "api-keys" -}}
{{- $_ := set $ingress "api_keys_file" "/etc/serve-app/api-keys/keys" -}}
{{- end -}}
{{- if .Values.batches.databaseSecret -}}
{{- $batch := dict "database_file" "/etc/serve-app/batch-database/url" -}}
{{- $_ := set $ingress "batch" (merge $batch ($ingress.batch | default dict)) -}}
{{- end -}}
{{- $_ := set $config "ingress" $ingress -}}
{{- $token := dict "host" "0.0.0.0" "cluster_token_file" "/etc/serve-app/cluster-token/token" -}}
{{- $_ := set $config "protocol" (merge $token ($config.protocol | default dict)) -}}
{{- $models := dict -}}
{{- range $model := include "serve-app.models" . | fromYamlArray -}}
{{- $bound := dict "resources" (dict $model.resource 1) -}}
{{- if eq (include "serve-app.nodesOf" $model | int) 1 -}}{{- /* to Ray a pod is a node; replicas over several have no such limit */ -}}
{{- $_ := set $bound "replicas_per_node" 1 -}}
{{- end -}}
{{- $_ := set $models $model.name (merge $bound (omit $model "name" "at" "group" "resource" "order" "pods" "podsOf" "guests" "served")) -}}
{{- end -}}
{{- $_ := set $config "models" $models -}}
{{ toYaml $config }}
{{- end }}

{{- /* "true" when some model or the ingress has min != max. */}}
{{- define "serve-app.scales" -}}
{{- $ingress := dig "ingress" "replicas" dict .Values.config -}}
{{- $scales := ne (int (dig "min" 1 $ingress)) (int (dig "max" 1 $ingress)) -}}
{{- range include "serve-app.models" . | fromYamlArray -}}
{{- if ne (int (dig "replicas" "min" 1 .)) (int (dig "replicas" "max" 1 .)) -}}{{- $scales = true -}}{{- end -}}
{{- end -}}
{{ $scales }}
{{- end }}

{{- /* Of each model with min != max, the entry of its deployment, as serve_app.application.first_entries makes it. A JSON list. */}}
{{- define "serve-app.boundsEntries" -}}
{{- $entries := list -}}
{{- range $name, $model := . -}}
{{- $least := int (dig "replicas" "min" 1 $model) -}}
{{- $most := int (dig "replicas" "max" 1 $model) -}}
{{- if ne $least $most -}}
{{- $plain := regexReplaceAll "[^A-Za-z0-9_-]" $name "-" -}}
{{- if ne $plain $name -}}{{- $plain = printf "%s-%s" $plain (sha256sum $name | trunc 6) -}}{{- end -}}
{{- $bounds := dict "min_replicas" $least "max_replicas" $most -}}
{{- $_ := set $bounds "initial_replicas" nil -}}{{- /* nil keeps the replicas that run: Serve makes a number its target at each upgrade */ -}}
{{- $delays := dict "upscale_delay_s" 0 "downscale_delay_s" 0 "metrics_interval_s" 1 "look_back_period_s" 2 -}}
{{- $entries = append $entries (dict "name" (printf "replica-%s" $plain) "autoscaling_config" (merge $bounds $delays)) -}}
{{- end -}}
{{- end -}}
{{ toJson $entries }}
{{- end }}

{{- define "serve-app.serveConfig" -}}
{{- $config := include "serve-app.config" . | fromYaml -}}
{{- $application := dict "name" (include "serve-app.fullname" .) "route_prefix" nil "import_path" "serve_app.application:build" "args" $config -}}
{{- if eq (include "serve-app.scales" .) "true" -}}
{{- $policy := dict "policy_function" "serve_app.autoscaling.policy:DemandPolicy" "policy_kwargs" (dict "settings" $config) -}}
{{- $_ := set $application "autoscaling_policy" $policy -}}
{{- with include "serve-app.boundsEntries" $config.models | fromJsonArray -}}{{- $_ := set $application "deployments" . -}}{{- end -}}
{{- end -}}
{{ toYaml (dict "proxy_location" "Disabled" "applications" (list $application)) }}
{{- end }}

{{- /* The chain of limits in whole seconds, each derived from drain_s unless given. As YAML: drain, unready, noReplica, keepAlive,
serve (Serve's graceful shutdown, as serve_app.application computes it), rayDrain, grace, gcsReconnect, deletionDelay. */}}
{{- define "serve-app.timeouts" -}}
{{- $given := .Values.timeouts.overrides -}}
{{- $drain := dig "timeouts" "drain_s" 600 .Values.config | ceil | int -}}
{{- $unready := dig "ingress" "unready_s" 1 .Values.config | ceil | int -}}
{{- $serve := add $drain $unready 10 | int -}}
{{- $rayDrain := int $given.rayDrainSeconds | default (add $serve 10) | int -}}
{{- $grace := int $given.terminationGracePeriodSeconds | default (add $rayDrain .Values.timeouts.preStopSleepSeconds 10) | int -}}
drain: {{ $drain }}
unready: {{ $unready }}
noReplica: {{ dig "timeouts" "no_replica_s" 30 .Values.config | ceil | int }}
keepAlive: {{ dig "ingress" "keep_alive_s" 65 .Values.config | ceil | int }}
serve: {{ $serve }}
rayDrain: {{ $rayDrain }}
grace: {{ $grace }}
gcsReconnect: {{ int $given.gcsReconnectSeconds | default (max 600 (add $grace 60)) | int }}
deletionDelay: {{ int $given.rayClusterDeletionDelaySeconds | default (add $drain 60) | int }}
{{- end }}
