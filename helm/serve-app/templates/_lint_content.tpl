{{- /* What the tables of files/lints/content.yaml judge: images, secrets and weights. Args of all: in, as of serve-app.judge. */}}

{{- define "serve-app.lintImages" -}}
{{- $in := . -}}{{- $v := .root.Values -}}
{{- range $path, $image := dict "image" $v.image "cudaImage" $v.cudaImage "gcsFaultTolerance.redis.image" $v.gcsFaultTolerance.redis.image
    "weights.s3Image" $v.weights.s3Image -}}
{{- include "serve-app.judge" (dict "in" $in "table" "images" "path" $path "image" $image) -}}
{{- end -}}
{{- range .groups -}}
{{- include "serve-app.judge" (dict "in" $in "table" "model_images" "model" .model "pods" .pods
    "made" (include "serve-app.cudaTag" $in.root)) -}}
{{- $model := .model -}}
{{- range $in.tables.packagesOfFormats -}}
{{- include "serve-app.judge" (dict "in" $in "table" "model_formats" "model" $model "known" .
    "given" (get ($model.engine_args | default dict) "load_format" | toString)) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- /* Whether a variable holds a secret, as "true" or "false": its name says so, and its value is neither short, nor a number, nor the
path of a file, nor another variable. Args: name, value. */}}
{{- define "serve-app.isSecret" -}}
{{- $value := toString .value -}}
{{- and (regexMatch "(?i)(token$|secret|passw|api_?key|credential)" .name) (ge (len $value) 8)
    (not (regexMatch "^([0-9.]+|(file:/*)?(/[A-Za-z0-9._-]+)+/?|[$][(].*[)])$" $value)) -}}
{{- end }}

{{- define "serve-app.lintSecrets" -}}
{{- $in := . -}}{{- $v := .root.Values -}}
{{- $all := dict "head" $v.head "ingressPods" $v.ingressPods "modelPods" $v.modelPods "weights" $v.weights -}}
{{- range .groups -}}
{{- $model := .model -}}
{{- range $name := list "hf_token" "hf-token" -}}
{{- include "serve-app.judge" (dict "in" $in "table" "secret_arguments" "model" $model "name" $name
    "token" (get ($model.engine_args | default dict) $name)) -}}
{{- end -}}
{{- range $name, $value := $model.env | default dict -}}
{{- include "serve-app.judge" (dict "in" $in "table" "secret_env" "model" $model "name" $name "value" $value) -}}
{{- end -}}
{{- $_ := set $all (printf "%s.pods" $model.at) ($model.pods | default dict) -}}
{{- end -}}
{{- range $path, $pods := $all -}}
{{- $env := $pods.extraEnv | default list -}}
{{- $extra := $pods.extra | default dict -}}
{{- range concat ($extra.containers | default list) ($extra.initContainers | default list) -}}
{{- $env = concat $env (.env | default list) -}}
{{- end -}}
{{- range $env -}}
{{- include "serve-app.judge" (dict "in" $in "table" "secret_variables" "path" $path "name" .name "value" (.value | default "")) -}}
{{- end -}}
{{- end -}}
{{- range $v.extraObjects -}}
{{- if kindIs "map" . }}{{ include "serve-app.judge" (dict "in" $in "table" "secret_objects" "object" .) }}{{ end -}}
{{- end -}}
{{- $known := printf "(%s)" (join "|" .tables.secretForms) -}}
{{- $found := regexFind $known (toJson $v) | regexFind "[A-Za-z:-].{5,}" -}}
{{- if $found -}}
{{- $at := include "serve-app.placeOf" (dict "at" "" "value" $v "form" $known) -}}
{{- include "serve-app.judge" (dict "in" . "table" "secret_texts" "found" $found "at" $at) -}}
{{- end -}}
{{- end }}

{{- /* The path of the first text of this form below a value. Args: at (the path of the value), value, form. */}}
{{- define "serve-app.placeOf" -}}
{{- $found := "" -}}{{- $args := . -}}
{{- $below := dict -}}
{{- if kindIs "map" .value }}{{ range $key, $value := .value }}{{ $_ := set $below (printf ".%s" $key) $value }}{{ end }}{{ end -}}
{{- if kindIs "slice" .value }}{{ range $i, $value := .value }}{{ $_ := set $below (printf "[%d]" $i) $value }}{{ end }}{{ end -}}
{{- range $step, $value := $below -}}
{{- if and (not $found) (regexMatch $args.form (toJson (dict $step $value))) -}}
{{- $found = include "serve-app.placeOf" (dict "at" (printf "%s%s" $args.at $step) "value" $value "form" $args.form) -}}
{{- end -}}
{{- end -}}
{{ $found | default (trimPrefix "." .at) }}
{{- end }}

{{- /* Args: in, at, path, what, paths, as of the table `fetched`. A download brings all that is below its path. */}}
{{- define "serve-app.lintFetched" -}}
{{- $path := .path -}}{{- $is_fetched := false -}}
{{- range .paths }}{{ if hasPrefix (printf "%s/" .) (printf "%s/" $path) }}{{ $is_fetched = true }}{{ end }}{{ end -}}
{{- include "serve-app.judge" (merge (dict "table" "fetched" "is_fetched" $is_fetched) .) -}}
{{- end }}

{{- /* Args: in, at, text, forms, as of the table `places`. The first form that matches counts. */}}
{{- define "serve-app.lintPlace" -}}
{{- $args := . -}}{{- $is_found := false -}}
{{- range .forms -}}
{{- if and (not $is_found) (regexMatch .pattern $args.text) -}}
{{- $is_found = true -}}
{{- include "serve-app.judge" (merge (dict "table" "places" "form" .) $args) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "serve-app.lintWeights" -}}
{{- $in := . -}}{{- $v := .root.Values -}}
{{- $paths := list -}}
{{- range $v.weights.downloads }}{{ $paths = append $paths (printf "/models/%s" .path) }}{{ end -}}
{{- $is_open := or (not $v.networkPolicies.enabled) (not (empty $v.networkPolicies.extraEgress)) -}}
{{- range $model := .models -}}
{{- if hasPrefix "/models/" $model.model -}}
{{- include "serve-app.lintFetched" (dict "in" $in "at" (printf "%s.model is %s" $model.at $model.model) "path" $model.model
    "what" "weights" "paths" $paths) -}}
{{- end -}}
{{- range $name, $adapter := $model.adapters | default dict -}}
{{- include "serve-app.lintPlace" (dict "in" $in "at" (printf "%s.adapters.%s.path" $model.at $name) "text" $adapter.path
    "forms" $in.shared.folderForms) -}}
{{- if hasPrefix "/models/" $adapter.path -}}
{{- $at := printf "%s.adapters.%s.path is %s" $model.at $name $adapter.path -}}
{{- include "serve-app.lintFetched" (dict "in" $in "at" $at "path" $adapter.path "what" "adapter" "paths" $paths) -}}
{{- end -}}
{{- end -}}
{{- $wrong := include "serve-app.lintPlace" (dict "in" $in "at" (printf "%s.model" $model.at) "text" $model.model
    "forms" $in.shared.modelForms) -}}
{{- $wrong -}}
{{- include "serve-app.judge" (dict "in" $in "table" "model_weights" "model" $model "is_wrong" (trim $wrong) "is_open" $is_open) -}}
{{- end -}}
{{- $claim_pods := "" -}}
{{- range .groups -}}
{{- $most := dig "replicas" "max" 1 .model | int -}}
{{- if and .pods.onePerNode (eq (dig "device" "cpu" .model) "cuda") (gt $most 1) -}}
{{- $claim_pods = printf "%s.replicas.max is %d, each on a node of its own" .model.at $most -}}
{{- end -}}
{{- end -}}
{{- include "serve-app.judge" (dict "in" . "table" "weights" "paths" $paths "claim_pods" $claim_pods) -}}
{{- range $i, $download := $v.weights.downloads -}}
{{- include "serve-app.judge" (dict "in" $in "table" "downloads" "i" $i "download" $download "before" (slice $paths 0 $i)) -}}
{{- end -}}
{{- end }}
