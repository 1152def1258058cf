{{- /* The models that are served, as a YAML list in the form of serve-app.groups. */}}
{{- define "serve-app.models" -}}
{{- $served := list -}}
{{- range include "serve-app.groups" . | fromYamlArray -}}
{{- if .served }}{{ $served = append $served . }}{{ end -}}
{{- end -}}
{{ toYaml $served }}
{{- end }}

{{- /* All models, as a YAML list by `order` and name: each with its keys, and `name`; `at`, its path in values; `group`, its worker group;
`resource`, the Ray resource of that group; `served`; `guests`, the models whose `podsOf` names it, with their keys. Group and resource
depend on the model's own name alone, so that they stay when other models come or go. A canary stands behind all models: it comes and goes
while they serve. A guest has group, resource and `pods` of the model that its `podsOf` names. */}}
{{- define "serve-app.groups" -}}
{{- $models := .Values.config.models | default (include "serve-app.defaultModels" . | fromYaml) -}}
{{- $guests := dict -}}
{{- range $name, $model := $models -}}
{{- with $model.podsOf }}{{ $_ := set $guests . (append (get $guests . | default list) $model) }}{{ end -}}
{{- end -}}
{{- $places := dict -}}
{{- range $name, $model := $models -}}
{{- $_ := set $places (printf "%06d %s" (dig "order" (ternary 999999 0 (not (empty $model.canary))) $model | int) $name) $name -}}
{{- end -}}
{{- range keys $places | sortAlpha }}
{{- $name := index $places . -}}
{{- $model := index $models $name -}}
{{- if not (kindIs "map" (dig "replicas" dict $model)) }}{{ $model = omit $model "replicas" }}{{ end -}}{{- /* a rule refuses the number */ -}}
{{- $host := $model.podsOf | default $name -}}
{{- $plain := regexReplaceAll "[^a-z0-9]+" (lower $host) "-" | trimAll "-" -}}
{{- if or (ne $plain $host) (gt (len $plain) 30) -}}
{{- $plain = printf "%s-%s" (trunc 23 $plain | trimSuffix "-") (sha256sum $host | trunc 6) -}}
{{- end -}}
{{- $at := ternary (printf "config.models.%s" $name) (printf "config.models[%q]" $name) (regexMatch "^[A-Za-z0-9_-]+$" $name) -}}
{{- $known := dict "name" $name "at" $at "served" (dig "served" true $model) "group" (printf "model-%s" $plain) "resource" (printf "serve_app_model_%s" (replace "-" "_" $plain)) }}
{{- with get $guests $name }}{{ $_ := set $known "guests" . }}{{ end -}}
{{- with $model.podsOf }}{{ $_ := set $known "pods" (dig . "pods" $.Values.modelPods $models) }}{{ end }}
- {{ merge $known $model | toYaml | nindent 2 | trim }}
{{- end }}
{{- end }}

{{- /* Engines in one pod of a model: those that sleep share its GPU. */}}
{{- define "serve-app.sharing" -}}
{{ dig "replicas_per_gpu" 1 (.sleep | default dict) | int }}
{{- end }}

{{- /* The pods of how many replicas a model and its served guests need: the sum of their `replicas`, by a key of it or else `min`, divided by
the engines in a pod, rounded up. Args: model, key. */}}
{{- define "serve-app.replicasFor" -}}
{{- $sum := 0 -}}
{{- range prepend (.model.guests | default list) .model -}}
{{- $replicas := dig "replicas" dict . -}}
{{- $replicas = ternary $replicas dict (kindIs "map" $replicas) -}}
{{- if dig "served" true . -}}
{{- $sum = add $sum (dig $.key "" $replicas | default (dig "min" 1 $replicas) | int) -}}
{{- end -}}
{{- end -}}
{{- $sharing := include "serve-app.sharing" .model | int -}}
{{ div (add $sum $sharing -1) $sharing }}
{{- end }}

{{- /* The name of the model that `helm test` asks: the first that always has a replica, else the first. */}}
{{- define "serve-app.askedModel" -}}
{{- $names := list -}}{{- $always := list -}}
{{- range include "serve-app.models" . | fromYamlArray -}}
{{- $names = append $names .name -}}
{{- if dig "replicas" "min" 1 . | int }}{{ $always = append $always .name }}{{ end -}}
{{- end -}}
{{ first (concat $always $names) }}
{{- end }}

{{- define "serve-app.defaultModels" -}}
smollm2-135m-instruct:
  model: embedded:smollm2-135m-instruct
  engine_args: {dtype: float32, max_model_len: 2048, max_num_seqs: 64}
{{- end }}

{{- /* The pods of one replica of a model: one on each of its nodes. */}}
{{- define "serve-app.nodesOf" -}}
{{ dig "nodes" 1 . | int }}
{{- end }}

{{- /* The GPUs of one pod of a model: each of a replica's nodes holds the same number. */}}
{{- define "serve-app.gpusOfPod" -}}
{{ div (dig "gpus_per_replica" 0 . | int) (include "serve-app.nodesOf" . | int) }}
{{- end }}

{{- /* The settings of one model's pods, which groups, headroom and lints share. Sizes come from serve-app.modelSizes; values of modelPods
replace them, and values of the model's own `pods` replace both. `image` becomes cpu or cuda, `gpus` (of one pod) and `nodes` (pods of one
replica) are added, models on cpu have no compile cache, and a canary keeps no node free but by its own `pods`. Args: root, model. */}}
{{- define "serve-app.modelPods" -}}
{{- $cuda := eq (dig "device" "cpu" .model) "cuda" -}}
{{- $pods := mergeOverwrite (deepCopy .root.Values.modelPods) (deepCopy (.model.pods | default dict)) -}}
{{- $sizes := include "serve-app.modelSizes" (dict "model" .model "pods" $pods) | fromYaml -}}
{{- $_ := set $pods "resources" (mergeOverwrite $sizes.resources $pods.resources) -}}
{{- range $key := list "shmSize" "homeSize" -}}
{{- $_ := set $pods $key (get $pods $key | default (get $sizes $key)) -}}
{{- end -}}
{{- $_ := set $pods "nodes" (include "serve-app.nodesOf" .model | int) -}}
{{- $_ := set $pods "gpus" (include "serve-app.gpusOfPod" .model | int) -}}
{{- if eq $pods.image "auto" -}}
{{- $_ := set $pods "image" (ternary "cuda" "cpu" $cuda) -}}
{{- end -}}
{{- if not $cuda -}}
{{- $_ := set $pods.compileCache "existingClaim" "" -}}
{{- end -}}
{{- if .model.canary -}}
{{- $_ := set $pods.headroom "pods" (dig "pods" "headroom" "pods" 0 .model) -}}
{{- end -}}
{{ toYaml $pods }}
{{- end }}

{{- /* The least memory, in Gi, in which vLLM reads a checkpoint ahead: the checkpoint must fit 90 % of what the pod's limit leaves free.
Args: the pods' settings. */}}
{{- define "serve-app.readAheadGi" -}}
{{- divf (include "serve-app.quantity" (.checkpointSize | default 0)) 1073741824 0.9 | ceil | int -}}
{{- end }}

{{- /* The memory, in Gi, that a model's pod keeps KV in. vLLM maps it in /dev/shm. Simulated engines keep none. Args: the model. */}}
{{- define "serve-app.offloadGi" -}}
{{ ternary (dig "kv" "offload_gib" 0 . | float64 | ceil | int) 0 (eq (dig "device" "cpu" .) "cuda") }}
{{- end }}

{{- /* What a model's pod needs when values say nothing. values.yaml has the formulas and their reasons. Args: model, pods (its settings). */}}
{{- define "serve-app.modelSizes" -}}
{{- $gpus := include "serve-app.gpusOfPod" .model | int -}}
{{- $engines := include "serve-app.sharing" .model | int -}}
{{- if eq (dig "device" "cpu" .model) "cuda" -}}
{{- $asleep := divf (include "serve-app.quantity" (.pods.asleepSize | default 0)) 1073741824 | ceil | int -}}
{{- $asked := add 4 (mul 8 $gpus $engines) $asleep -}}
{{- $limit := max (add 8 (mul 16 $gpus $engines) $asleep) (include "serve-app.readAheadGi" .pods | int | add $asked) -}}
{{- $kv := mul $engines (include "serve-app.offloadGi" .model | int) -}}
resources:
  requests: {cpu: {{ add $gpus 2 | quote }}, memory: {{ add $asked $kv }}Gi, ephemeral-storage: 8Gi}
  limits: {cpu: {{ add 4 (mul 4 $gpus) | quote }}, memory: {{ add $limit $kv }}Gi}
shmSize: {{ add 2 (mul $gpus $engines) $kv }}Gi
homeSize: {{ ternary "8Gi" "200Gi" (or (hasPrefix "embedded:" .model.model) (hasPrefix "/" .model.model)) }}
{{- else -}}
resources:
  requests: {cpu: 500m, memory: 3Gi, ephemeral-storage: 1Gi}
  limits: {cpu: "2", memory: 6Gi}
shmSize: 1Gi
homeSize: 8Gi
{{- end -}}
{{- end }}
