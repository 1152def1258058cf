{{- /* What the tables of files/lints/config.yaml judge: ports, replicas and GPUs. Args of all: in, as of serve-app.judge. */}}

{{- /* The keys of each section of `config` at a place such as models.NAME.replicas: a JSON object from path to keys. Args: config, place. */}}
{{- define "serve-app.keysAt" -}}
{{- $found := dict "config" .config -}}
{{- range $step := splitList "." .place | compact -}}
{{- $below := dict -}}
{{- range $path, $section := $found -}}
{{- range $key, $value := $section -}}
{{- if or (eq $step "NAME") (eq $step $key) -}}
{{- if kindIs "map" $value }}{{ $_ := set $below (printf "%s.%s" $path $key) $value }}{{ end -}}
{{- if kindIs "slice" $value -}}
{{- range $i, $entry := $value }}{{ $_ := set $below (printf "%s.%s[%d]" $path $key $i) $entry }}{{ end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $found = $below -}}
{{- end -}}
{{- range $path, $section := $found }}{{ $_ := set $found $path (keys $section | sortAlpha) }}{{ end -}}
{{ toJson $found }}
{{- end }}

{{- /* A key in snake case: max_model_len for --max-model-len, request_gpu_type for requestGPUType. */}}
{{- define "serve-app.plainName" -}}
{{- $words := regexReplaceAll "([a-z0-9])([A-Z])" (regexReplaceAll "^-+" . "") "${1}_${2}" -}}
{{ regexReplaceAll "([A-Z])([A-Z][a-z])" $words "${1}_${2}" | replace "-" "_" | lower }}
{{- end }}

{{- define "serve-app.lintPorts" -}}
{{- $in := . -}}
{{- $config := .root.Values.config -}}
{{- $ingress := dig "ingress" "port" 8010 $config | int -}}
{{- $link := dig "protocol" "port" 0 $config | int -}}
{{- include "serve-app.judge" (dict "in" . "table" "ports" "link" $link "ingress" $ingress) -}}
{{- range $path, $port := dict "config.ingress.port" $ingress "config.protocol.port" $link -}}
{{- $other := ternary "8020" "8010" (eq $path "config.protocol.port") -}}
{{- range prepend $in.shared.ports (dict "first" 1 "last" 1023 "owner" "root alone") -}}
{{- include "serve-app.judge" (dict "in" $in "table" "reserved" "path" $path "port" $port "other" $other "range" .) -}}
{{- end -}}
{{- end -}}
{{- include "serve-app.judge" (dict "in" . "table" "size" "bytes" (len (include "serve-app.config" .root))) -}}
{{- end }}

{{- define "serve-app.lintScaling" -}}
{{- $in := . -}}
{{- $config := .root.Values.config -}}
{{- $parts := dict "config.ingress.replicas" (dig "ingress" "replicas" dict $config) -}}
{{- $nodes := dict -}}
{{- range .models -}}
{{- $_ := set $parts (printf "%s.replicas" .at) (.replicas | default dict) -}}
{{- $_ := set $nodes (printf "%s.replicas" .at) (include "serve-app.nodesOf" . | int) -}}
{{- end -}}
{{- range $path, $replicas := $parts -}}
{{- include "serve-app.judge" (dict "in" $in "table" "replicas" "path" $path "pods" (get $nodes $path | default 1)
    "min" (dig "min" 1 $replicas | int) "max" (dig "max" 1 $replicas | int)) -}}
{{- end -}}
{{- include "serve-app.judge" (dict "in" . "table" "links" "links" (dig "protocol" "max_ingresses" 64 $config | int)
    "ingresses" (dig "ingress" "replicas" "max" 1 $config | int)) -}}
{{- end }}

{{- /* Models that sleep, and the pods that they share. */}}
{{- define "serve-app.lintSleep" -}}
{{- $in := . -}}
{{- $link := dig "protocol" "port" 8020 .root.Values.config | int -}}
{{- $models := .root.Values.config.models | default dict -}}
{{- range include "serve-app.groups" .root | fromYamlArray -}}
{{- $args := dict "in" $in "model" . "sharing" (include "serve-app.sharing" . | int) -}}
{{- if .podsOf -}}
{{- $host := get $models .podsOf | default dict -}}
{{- include "serve-app.judge" (merge (dict "table" "guests" "host" $host "own" (get $models .name).pods
    "theirs" (include "serve-app.sharing" $host | int)) $args) -}}
{{- else if kindIs "map" .sleep -}}
{{- $keeps := list -}}
{{- range prepend (.guests | default list) . -}}
{{- if and (not .simulated) (eq (dig "sleep" "level" 1 . | int) 1) }}{{ $keeps = append $keeps . }}{{ end -}}
{{- end -}}
{{- $pods := include "serve-app.modelPods" (dict "root" $in.root "model" .) | fromYaml -}}
{{- include "serve-app.judge" (merge (dict "table" "sleepers" "pods" $pods "keeps" (len $keeps)) $args) -}}
{{- $last := add $link $args.sharing -1 | int -}}
{{- range $in.shared.ports -}}
{{- include "serve-app.judge" (merge (dict "table" "shared_ports" "first" $link "last" $last "range" .) $args) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "serve-app.lintGpus" -}}
{{- $in := . -}}
{{- $wait := dig "timeouts" "no_replica_s" 30 .root.Values.config | float64 -}}
{{- $sizes := dict -}}
{{- range .groups -}}
{{- $all := dig "gpus_per_replica" 0 .model | int -}}
{{- $has := ternary (printf "%d" $all) (printf "%d on %d nodes" $all (int .pods.nodes)) (eq (int .pods.nodes) 1) -}}
{{- $args := dict "in" $in "model" .model "pods" .pods "gpus" (int .pods.gpus) "has" $has "per_node" (int .pods.gpusPerNode) "wait_s" $wait -}}
{{- include "serve-app.judge" (set $args "table" "gpus") -}}
{{- if and (int .pods.gpusPerNode) (int .pods.gpus) -}}
{{- $place := list .pods.nodeSelector .pods.tolerations .pods.affinity .pods.gpuResource | toJson -}}
{{- $args := dict "in" $in "table" "same_nodes" "model" .model "per_node" (int .pods.gpusPerNode) -}}
{{- with get $sizes $place }}{{ include "serve-app.judge" (merge $args .) }}{{ end -}}
{{- $_ := set $sizes $place (get $sizes $place | default (dict "other" .model.at "its" (int .pods.gpusPerNode))) -}}
{{- end -}}
{{- range $kind, $amounts := .pods.resources -}}
{{- include "serve-app.judge" (merge (dict "table" "amounts" "kind" $kind "amounts" ($amounts | default dict)) $args) -}}
{{- end -}}
{{- if .model.served -}}
{{- include "serve-app.judge" (set $args "table" "headroom") -}}
{{- include "serve-app.judge" (set $args "table" "wakes") -}}
{{- end -}}
{{- end -}}
{{- end }}
