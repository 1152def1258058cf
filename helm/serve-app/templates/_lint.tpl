{{- /* Checks across values. Each emits one line per problem: the name of its rule and a sentence with both values and the way out, as a
JSON list. All are reported together, but for those that ignoredRules names; tests/chart/test_lint.py and test_lint_timeouts.py trigger each. */}}
{{- define "serve-app.lint" -}}
{{- $problems := printf "%s\n%s" (include "serve-app.lintForeign" .) (include "serve-app.lintConfig" .) | trim -}}
{{- if not $problems -}}{{- /* the other checks read names and configuration that these refuse */ -}}
{{- range list "Ports" "ConfigSize" "Accounts" "Timeouts" "Alb" "Edge" "Open" "Kinds" "Scaling" "Gpus" "Headroom" "Pods" "Additions" "Folders" "Images" "ModelImages" "Secrets"
    "Weights" "Effect" "Tenants" "Redis" -}}
{{- $problems = printf "%s\n%s" $problems (include (printf "serve-app.lint%s" .) $) -}}
{{- end -}}
{{- end -}}
{{- $found := list -}}
{{- range splitList "\n" $problems | uniq -}}
{{- if . -}}
{{- $problem := fromJsonArray . -}}
{{- if not (has (first $problem) $.Values.ignoredRules) -}}
{{- $found = append $found (printf "  %s: %s" (first $problem) (last $problem)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if $found -}}
{{- fail (printf "the values break %d of the chart's rules:\n%s\nTo break a rule on purpose, put its name into ignoredRules." (len $found) (join "\n" $found)) -}}
{{- end -}}
{{- end }}

{{- /* What the chart sets itself may be repeated, not contradicted. */}}
{{- define "serve-app.lintConfig" -}}
{{- $fullname := include "serve-app.fullname" . -}}
{{- $called := ternary "fullnameOverride is" "the release is called" (ne .Values.fullnameOverride "") -}}
{{- $way := ternary "choose another" "choose another name, or set fullnameOverride" (ne .Values.fullnameOverride "") -}}
{{- if not (regexMatch "^[a-z]([a-z0-9-]*[a-z0-9])?$" $fullname) -}}
{{- list "release-name" (printf "%s %q, which cannot name a RayService: begin with a small letter, then small letters, digits and dashes; %s" $called $fullname $way) | toJson | nindent 0 -}}
{{- end -}}
{{- if gt (len $fullname) 41 -}}
{{- list "release-name" (printf "%s %q, which has %d characters, KubeRay allows 41: %s" $called $fullname (len $fullname) $way) | toJson | nindent 0 -}}
{{- end -}}
{{- $made := include "serve-app.config" . | fromYaml -}}
{{- range $path := list "name" "ingress.host" "ingress.resources" "ingress.api_keys_file" "ingress.tenants_file" "protocol.host" "protocol.cluster_token_file" -}}
{{- $keys := splitList "." $path -}}
{{- $parent := $.Values.config -}}
{{- $wanted := $made -}}
{{- range initial $keys -}}
{{- $parent = index $parent . | default dict -}}
{{- $wanted = index $wanted . -}}
{{- end -}}
{{- if hasKey $parent (last $keys) -}}
{{- $given := index $parent (last $keys) -}}
{{- if ne (toJson $given) (toJson (index $wanted (last $keys))) -}}
{{- list "set-by-chart" (printf "config.%s is %s, but in a cluster it is %s: remove it, the chart sets it" $path (toJson $given) (toJson (index $wanted (last $keys)))) | toJson | nindent 0 -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if not (include "serve-app.models" . | fromYamlArray) -}}
{{- list "nothing-served" (printf "served is false for each of config.models, %s: an ingress without a model answers nothing; set served: true for one" (keys .Values.config.models | sortAlpha | join ", ")) | toJson | nindent 0 -}}
{{- end -}}
{{- range $model := include "serve-app.groups" . | fromYamlArray -}}
{{- if $model.resources -}}
{{- list "set-by-chart" (printf "%s.resources is %s, but in a cluster it is {\"%s\":1}: remove it, the chart binds each model to its worker group" $model.at (toJson $model.resources) $model.resource) | toJson | nindent 0 -}}
{{- end -}}
{{- if gt (dig "replicas_per_node" 1 $model | int) 1 -}}
{{- list "set-by-chart" (printf "%s.replicas_per_node is %v, but a pod holds 1 replica: remove it, several pods fit on one node" $model.at $model.replicas_per_node) | toJson | nindent 0 -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- /* The ports that serve-app check refuses, and those that pods cannot have. */}}
{{- define "serve-app.lintPorts" -}}
{{- $ingress := dig "ingress" "port" 8010 .Values.config | int -}}
{{- $link := dig "protocol" "port" 0 .Values.config | int -}}
{{- if eq $link 0 -}}
{{- list "port-taken" "config.protocol.port is 0, any port, but network policies and probes must name it: set it to 8020" | toJson | nindent 0 -}}
{{- end -}}
{{- if eq $link $ingress -}}
{{- list "port-taken" (printf "config.protocol.port is %d, and so is config.ingress.port: choose another, for example 8020" $link) | toJson | nindent 0 -}}
{{- end -}}
{{- $taken := prepend (.Files.Get "files/rules.yaml" | fromYaml).ports (dict "first" 1 "last" 1023 "owner" "root alone") -}}
{{- range $path, $port := dict "config.ingress.port" $ingress "config.protocol.port" $link -}}
{{- range $taken -}}
{{- if and $port (ge $port (int .first)) (le $port (int .last)) -}}
{{- list "port-taken" (printf "%s is %d, which belongs to %s: choose another, for example %s" $path $port .owner (ternary "8020" "8010" (eq $path "config.protocol.port"))) | toJson | nindent 0 -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- /* The job that checks the configuration has it in an annotation; Kubernetes takes 262144 bytes of all together. */}}
{{- define "serve-app.lintConfigSize" -}}
{{- $size := len (include "serve-app.config" .) -}}
{{- if and .Values.check.enabled (gt $size 250000) -}}
{{- list "config-too-large" (printf "the configuration has %d bytes, the job that checks it takes 250000: put chat templates into a file that modelPods.extraVolumes mounts, or set check.enabled to false" $size) | toJson | nindent 0 -}}
{{- end -}}
{{- end }}

{{- define "serve-app.lintScaling" -}}
{{- $parts := dict "config.ingress.replicas" (dig "ingress" "replicas" dict .Values.config) -}}
{{- range $model := include "serve-app.models" . | fromYamlArray -}}
{{- $_ := set $parts (printf "%s.replicas" $model.at) ($model.replicas | default dict) -}}
{{- end -}}
{{- range $path, $replicas := $parts -}}
{{- $min := dig "min" 1 $replicas | int -}}{{- $max := dig "max" 1 $replicas | int -}}
{{- if gt $min $max -}}
{{- list "min-above-max" (printf "%s.min is %d, but max is %d: set max to %d or more" $path $min $max $min) | toJson | nindent 0 -}}
{{- end -}}
{{- if and (gt $max 5000) (ne $path "config.ingress.replicas") -}}{{- /* too-few-links bounds the ingresses, by less */}}
{{- list "too-many-replicas" (printf "%s.max is %d, but a worker group has 10000 pods at most, and an update may hold two for each replica: set max to 5000 or less" $path $max) | toJson | nindent 0 -}}
{{- end -}}
{{- end -}}
{{- $links := dig "protocol" "max_ingresses" 64 .Values.config | int -}}{{- $ingresses := dig "ingress" "replicas" "max" 1 .Values.config | int -}}
{{- if gt (mul 2 $ingresses | int) $links -}}
{{- $way := ternary (printf "set the former to %d or more, or lower the latter" (mul 2 $ingresses)) "set the latter to 512 or less" (le $ingresses 512) -}}
{{- list "too-few-links" (printf "config.protocol.max_ingresses is %d and config.ingress.replicas.max is %d: an update has up to %d ingresses at once, and a replica would refuse the links of the last ones; %s" $links $ingresses (mul 2 $ingresses) $way) | toJson | nindent 0 -}}
{{- end -}}
{{- end }}

{{- define "serve-app.lintGpus" -}}
{{- range $model := include "serve-app.groups" . | fromYamlArray -}}
{{- $pods := include "serve-app.modelPods" (dict "root" $ "model" $model) | fromYaml -}}
{{- $gpus := int $pods.gpus -}}
{{- if and $gpus (gt (int $pods.gpusPerNode) 0) -}}
{{- if ne 0 (mod (int $pods.gpusPerNode) $gpus | int) -}}
{{- list "gpus-do-not-divide" (printf "%s.gpus_per_replica is %d and modelPods.gpusPerNode is %v: it does not divide, GPUs would lie idle; use a divisor, or another node type" $model.at $gpus $pods.gpusPerNode) | toJson | nindent 0 -}}
{{- end -}}
{{- if and $pods.onePerNode (not $pods.affinity.podAntiAffinity) (ne (int $pods.gpusPerNode) $gpus) -}}
{{- list "gpus-idle" (printf "%s.gpus_per_replica is %d, modelPods.gpusPerNode is %v and modelPods.onePerNode is true: %d GPUs of each node would lie idle; set onePerNode to false, or use nodes of %d GPUs" $model.at $gpus $pods.gpusPerNode (sub (int $pods.gpusPerNode) $gpus) $gpus) | toJson | nindent 0 -}}
{{- end -}}
{{- end -}}
{{- range $kind, $amounts := $pods.resources -}}
{{- if hasKey ($amounts | default dict) $pods.gpuResource -}}
{{- list "gpus-set-twice" (printf "modelPods.resources.%s has %s %v and %s.gpus_per_replica is %d: remove the former, the chart sets it" $kind $pods.gpuResource (index $amounts $pods.gpuResource) $model.at $gpus) | toJson | nindent 0 -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}
