{{- /* Checks across values. Each failure is one sentence with both values and the way out; tests/chart/test_lint.py triggers each. */}}
{{- define "serve-app.lint" -}}
{{- include "serve-app.lintConfig" . -}}
{{- include "serve-app.lintPorts" . -}}
{{- include "serve-app.lintTimeouts" . -}}
{{- include "serve-app.lintEdge" . -}}
{{- include "serve-app.lintScaling" . -}}
{{- include "serve-app.lintGpus" . -}}
{{- include "serve-app.lintHeadroom" . -}}
{{- include "serve-app.lintPods" . -}}
{{- include "serve-app.lintImages" . -}}
{{- include "serve-app.lintModelImages" . -}}
{{- include "serve-app.lintSecrets" . -}}
{{- include "serve-app.lintWeights" . -}}
{{- include "serve-app.lintEffect" . -}}
{{- include "serve-app.lintRedis" . -}}
{{- end }}

{{- /* What the chart sets itself may be repeated, not contradicted. */}}
{{- define "serve-app.lintConfig" -}}
{{- if not (regexMatch "^[a-z]([a-z0-9-]*[a-z0-9])?$" .Release.Name) -}}
{{- fail (printf "the release is called %q, which cannot name a RayService: begin with a letter, then letters, digits and dashes" .Release.Name) -}}
{{- end -}}
{{- if gt (len .Release.Name) 41 -}}
{{- fail (printf "the release's name %q has %d characters, KubeRay allows 41: choose a shorter one" .Release.Name (len .Release.Name)) -}}
{{- end -}}
{{- $made := include "serve-app.config" . | fromYaml -}}
{{- range $path := list "name" "ingress.host" "ingress.resources" "ingress.api_keys_file" "protocol.host" "protocol.cluster_token_file" -}}
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
{{- fail (printf "config.%s is %s, but in a cluster it is %s: remove it, the chart sets it" $path (toJson $given) (toJson (index $wanted (last $keys)))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $model := include "serve-app.models" . | fromYamlArray -}}
{{- if $model.resources -}}
{{- fail (printf "%s.resources is %s, but in a cluster it is {\"%s\":1}: remove it, the chart binds each model to its worker group" $model.at (toJson $model.resources) $model.resource) -}}
{{- end -}}
{{- if gt (dig "replicas_per_node" 1 $model | int) 1 -}}
{{- fail (printf "%s.replicas_per_node is %v, but a pod holds 1 replica: remove it, several pods fit on one node" $model.at $model.replicas_per_node) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- /* The ports of serve_app/config/checks.py, and what else the configuration refuses. */}}
{{- define "serve-app.lintPorts" -}}
{{- $ingress := dig "ingress" "port" 8010 .Values.config | int -}}
{{- $link := dig "protocol" "port" 0 .Values.config | int -}}
{{- if eq $link 0 -}}
{{- fail "config.protocol.port is 0, any port, but network policies and probes must name it: set it to 8020" -}}
{{- end -}}
{{- if eq $link $ingress -}}
{{- fail (printf "config.protocol.port is %d, and so is config.ingress.port: choose another, for example 8020" $link) -}}
{{- end -}}
{{- $taken := list (list 1 1023 "root alone") (list 6379 6379 "Ray's GCS") (list 8000 8000 "Ray Serve's own proxy")
  (list 8076 8079 "Ray's managers and agents") (list 8080 8080 "KubeRay's metrics exporter") (list 8265 8265 "Ray's dashboard")
  (list 10001 10001 "Ray's client server") (list 10002 10999 "Ray's worker processes") (list 52365 52365 "Ray's dashboard agent") -}}
{{- range $path, $port := dict "config.ingress.port" $ingress "config.protocol.port" $link -}}
{{- range $taken -}}
{{- if and (ge $port (index . 0)) (le $port (index . 1)) -}}
{{- fail (printf "%s is %d, which belongs to %s: choose another, for example %s" $path $port (index . 2) (ternary "8020" "8010" (eq $path "config.protocol.port"))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- /* What can never scale. */}}
{{- define "serve-app.lintScaling" -}}
{{- $parts := list (list "config.ingress.replicas" "target_streams" (dig "ingress" "replicas" dict .Values.config)) -}}
{{- range $model := include "serve-app.models" . | fromYamlArray -}}
{{- $parts = append $parts (list (printf "%s.replicas" $model.at) "utilization" ($model.replicas | default dict)) -}}
{{- end -}}
{{- range $parts -}}
{{- $path := index . 0 -}}{{- $target := index . 1 -}}{{- $replicas := index . 2 -}}
{{- $min := dig "min" 1 $replicas | int -}}{{- $max := dig "max" 1 $replicas | int -}}
{{- if gt $min $max -}}
{{- fail (printf "%s.min is %d, but max is %d: set max to %d or more" $path $min $max $min) -}}
{{- end -}}
{{- if gt $max 5000 -}}
{{- fail (printf "%s.max is %d, but a worker group has 10000 pods at most, and an update may hold two for each replica: set max to 5000 or less" $path $max) -}}
{{- end -}}
{{- if and (hasKey $replicas $target) (eq $min $max) -}}
{{- fail (printf "%s.%s is %v, but min is %d and max is %d: it can never scale; raise max, or remove the target" $path $target (index $replicas $target) $min $max) -}}
{{- end -}}
{{- end -}}
{{- range $model := include "serve-app.models" . | fromYamlArray -}}
{{- if and (eq 0 (dig "replicas" "min" 1 $model | int)) (dig "required" true $model) -}}
{{- fail (printf "%s.replicas.min is 0 and required is true: without a replica no ingress is ready, and no balancer sends the request that would start one; set required to false, or min to 1" $model.at) -}}
{{- end -}}
{{- end -}}
{{- with dig "autoscaling" "max_gpus" nil .Values.config -}}
{{- $least := 0 -}}
{{- range include "serve-app.models" $ | fromYamlArray -}}
{{- $least = add $least (mul (dig "replicas" "min" 1 . | int) (dig "gpus_per_replica" 0 . | int)) -}}
{{- end -}}
{{- if gt $least (int .) -}}
{{- fail (printf "config.autoscaling.max_gpus is %v, but the models' replicas.min need %d GPUs: raise max_gpus, or lower a min" . $least) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "serve-app.lintGpus" -}}
{{- range $model := include "serve-app.models" . | fromYamlArray -}}
{{- $pods := include "serve-app.modelPods" (dict "root" $ "model" $model) | fromYaml -}}
{{- $gpus := int $pods.gpus -}}
{{- if and $gpus (gt (int $pods.gpusPerNode) 0) -}}
{{- if ne 0 (mod (int $pods.gpusPerNode) $gpus | int) -}}
{{- fail (printf "%s.gpus_per_replica is %d and modelPods.gpusPerNode is %v: it does not divide, GPUs would lie idle; use a divisor, or another node type" $model.at $gpus $pods.gpusPerNode) -}}
{{- end -}}
{{- if and $pods.onePerNode (not $pods.affinity.podAntiAffinity) (ne (int $pods.gpusPerNode) $gpus) -}}
{{- fail (printf "%s.gpus_per_replica is %d, modelPods.gpusPerNode is %v and modelPods.onePerNode is true: %d GPUs of each node would lie idle; set onePerNode to false, or use nodes of %d GPUs" $model.at $gpus $pods.gpusPerNode (sub (int $pods.gpusPerNode) $gpus) $gpus) -}}
{{- end -}}
{{- end -}}
{{- range $kind, $amounts := $pods.resources -}}
{{- if hasKey ($amounts | default dict) $pods.gpuResource -}}
{{- fail (printf "modelPods.resources.%s has %s %v and %s.gpus_per_replica is %d: remove the former, the chart sets it" $kind $pods.gpuResource (index $amounts $pods.gpuResource) $model.at $gpus) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}
