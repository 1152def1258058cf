{{- define "serve-app.lintImages" -}}
{{- range $path, $image := dict "image" .Values.image "cudaImage" .Values.cudaImage "gcsFaultTolerance.redis.image" .Values.gcsFaultTolerance.redis.image "weights.s3Image" .Values.weights.s3Image -}}
{{- if and (eq $image.tag "latest") (not $image.digest) -}}
{{- list "image-latest" (printf "%s.tag is latest and %s.digest is empty: pods of one release would run different images; give a version or a digest" $path $path) | toJson | nindent 0 -}}
{{- end -}}
{{- if contains "@" $image.repository -}}
{{- list "image-tag-in-repository" (printf "%s.repository is %q: put what follows the @ into %s.digest" $path $image.repository $path) | toJson | nindent 0 -}}
{{- else if regexMatch ":[^/]+$" $image.repository -}}
{{- list "image-tag-in-repository" (printf "%s.repository is %q and %s.tag is %q: put the tag of the former into the latter" $path $image.repository $path $image.tag) | toJson | nindent 0 -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- /* Each model's pods get an image that can run it, of the build that the other pods have. */}}
{{- define "serve-app.lintModelImages" -}}
{{- range $model := include "serve-app.groups" . | fromYamlArray -}}
{{- $pods := include "serve-app.modelPods" (dict "root" $ "model" $model) | fromYaml -}}
{{- if and (eq $pods.image "cpu") (eq (dig "device" "cpu" $model) "cuda") -}}
{{- list "cuda-model-in-cpu-image" (printf "modelPods.image is cpu for %s, whose device is cuda: the CPU image has no CUDA; set image to auto, or device to cpu" $model.at) | toJson | nindent 0 -}}
{{- end -}}
{{- if and (eq $pods.image "cuda") (eq (dig "device" "cpu" $model) "cpu") (not $model.simulated) -}}
{{- list "cpu-model-in-cuda-image" (printf "modelPods.image is cuda for %s, which computes on cpu: vLLM in the CUDA image has no kernels for CPUs; set image to auto, or simulate the model" $model.at) | toJson | nindent 0 -}}
{{- end -}}
{{- if and (eq $pods.image "cuda") (not $.Values.cudaImage.tag) (not $.Values.cudaImage.digest) -}}
{{- $made := include "serve-app.cudaTag" $ -}}
{{- with $.Values.image.digest -}}
{{- list "cuda-image-of-another-build" (printf "image.digest is %s and %s runs the CUDA image, but cudaImage.tag and cudaImage.digest are empty: the tag %s, made of image.tag, may be of another build; set cudaImage.digest, or cudaImage.tag" . $model.at $made) | toJson | nindent 0 -}}
{{- end -}}
{{- if hasSuffix "-cuda" $.Values.image.tag -}}
{{- list "cuda-image-for-all-pods" (printf "image.tag is %s and cudaImage.tag is empty: %s would run the CUDA image %s, and all other pods an image for CUDA; set image.tag to %s, the CPU image's" $.Values.image.tag $model.at $made (trimSuffix "-cuda" $.Values.image.tag)) | toJson | nindent 0 -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- /* Whether a variable holds a secret, as "true" or "false": its name says so, and its value is neither short, nor a number, nor the path of a
file, nor another variable. Args: name, value. */}}
{{- define "serve-app.isSecret" -}}
{{- $value := toString .value -}}
{{- and (regexMatch "(?i)(token$|secret|passw|api_?key|credential)" .name) (ge (len $value) 8) (not (regexMatch "^([0-9.]+|(file:/*)?(/[A-Za-z0-9._-]+)+/?|[$][(].*[)])$" $value)) -}}
{{- end }}

{{- /* Values end up in the release's history, in serveConfigV2 and in dashboards: no place for secrets. */}}
{{- define "serve-app.lintSecrets" -}}
{{- range $model := include "serve-app.groups" . | fromYamlArray -}}
{{- range $name := list "hf_token" "hf-token" -}}
{{- $token := get ($model.engine_args | default dict) $name -}}
{{- if and $token (kindIs "string" $token) -}}
{{- list "secret-in-values" (printf "%s.engine_args.%s is a secret, and values are no place for one: put it into a Secret and name that in weights.huggingFaceTokenSecret" $model.at $name) | toJson | nindent 0 -}}
{{- end -}}
{{- end -}}
{{- range $name, $value := $model.env | default dict -}}
{{- if eq (include "serve-app.isSecret" (dict "name" $name "value" $value)) "true" -}}
{{- list "secret-in-values" (printf "%s.env.%s looks like a secret, and values are no place for one: weights.huggingFaceTokenSecret takes the token of a gated model, modelPods.extraVolumes any other file" $model.at $name) | toJson | nindent 0 -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $all := dict "head" .Values.head "ingressPods" .Values.ingressPods "modelPods" .Values.modelPods "weights" .Values.weights -}}
{{- range $model := include "serve-app.groups" . | fromYamlArray -}}
{{- $_ := set $all (printf "%s.pods" $model.at) ($model.pods | default dict) -}}
{{- end -}}
{{- range $path, $pods := $all -}}
{{- $env := $pods.extraEnv | default list -}}
{{- range concat ($pods.extraContainers | default list) ($pods.extraInitContainers | default list) }}{{ $env = concat $env (.env | default list) }}{{ end -}}
{{- range $env -}}
{{- if eq (include "serve-app.isSecret" (dict "name" .name "value" (.value | default ""))) "true" -}}
{{- list "secret-in-values" (printf "%s gives a container %s with a value, which looks like a secret, and values are no place for one: use valueFrom.secretKeyRef, or better a file through extraVolumes" $path .name) | toJson | nindent 0 -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range .Values.extraObjects -}}
{{- if kindIs "map" . -}}
{{- if and (eq (get . "kind" | toString) "Secret") (or .data .stringData) -}}
{{- list "secret-in-values" "extraObjects has a Secret with its data, and values are no place for one: make it outside of the chart, or by an ExternalSecret" | toJson | nindent 0 -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- /* In JSON, a new line before a key is a backslash and an n. */ -}}
{{- $known := "(hf_[A-Za-z0-9]{30,}|AKIA[0-9A-Z]{16}|([^A-Za-z0-9-]|\\\\n)sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{20,}|glpat-[A-Za-z0-9_-]{20,}|-----BEGIN [A-Z ]*PRIVATE KEY|://[^/@:\"\\s]*:[^/@\"\\s]+@)" -}}
{{- with regexFind $known (toJson .Values) | regexFind "[A-Za-z:-].{5,}" -}}
{{- list "secret-in-values" (printf "the values hold something that looks like a secret (%s...), and values are no place for one: put it into a Secret" (trunc 6 .)) | toJson | nindent 0 -}}
{{- end -}}
{{- end }}

{{- /* Args: named (whose path it is, for the sentence), path, paths (of the downloads). A download brings all that is below its path. */}}
{{- define "serve-app.lintFetched" -}}
{{- $path := .path -}}{{- $is_fetched := false -}}
{{- range .paths }}{{ if hasPrefix (printf "%s/" .) (printf "%s/" $path) }}{{ $is_fetched = true }}{{ end }}{{ end -}}
{{- if not $is_fetched -}}
{{- list "weights-not-fetched" (printf "%s, but weights.downloads fetches %s and weights.existingClaim is empty: nothing would be there; add a download with path %s or of a folder above it, or name the claim that has it" .named (join ", " .paths | default "nothing") (trimPrefix "/models/" $path)) | toJson | nindent 0 -}}
{{- end -}}
{{- end }}

{{- /* Serving pods reach no model hub: what they load is in the image, or in the weights volume. */}}
{{- define "serve-app.lintWeights" -}}
{{- $open := or (not .Values.networkPolicies.enabled) .Values.networkPolicies.extraEgress -}}
{{- $w := .Values.weights -}}
{{- $paths := list -}}
{{- range $w.downloads }}{{ $paths = append $paths (printf "/models/%s" .path) }}{{ end -}}
{{- range $model := include "serve-app.models" . | fromYamlArray -}}
{{- if hasPrefix "/models/" $model.model -}}
{{- if not $w.enabled -}}
{{- list "weights-not-enabled" (printf "%s.model is %s, but weights.enabled is false: enable it, and fetch the weights there or name an existing claim" $model.at $model.model) | toJson | nindent 0 -}}
{{- end -}}
{{- if hasSuffix "/" $model.model -}}
{{- list "weights-path-with-slash" (printf "%s.model is %s: write %s, by which its download is found" $model.at $model.model (trimSuffix "/" $model.model)) | toJson | nindent 0 -}}
{{- end -}}
{{- if and $w.enabled (not $w.existingClaim) -}}
{{- include "serve-app.lintFetched" (dict "named" (printf "%s.model is %s" $model.at $model.model) "path" $model.model "paths" $paths) -}}
{{- end -}}
{{- end -}}
{{- range $name, $adapter := $model.adapters | default dict -}}
{{- $named := printf "%s.adapters.%s.path is %s" $model.at $name $adapter.path -}}
{{- if hasPrefix "/models/" $adapter.path -}}
{{- if not $w.enabled -}}
{{- list "weights-not-enabled" (printf "%s, but weights.enabled is false: enable it, and fetch the adapter there or name an existing claim" $named) | toJson | nindent 0 -}}
{{- else if not $w.existingClaim -}}
{{- include "serve-app.lintFetched" (dict "named" $named "path" $adapter.path "paths" $paths) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if not (or (hasPrefix "/" $model.model) (hasPrefix "embedded:" $model.model) $open) -}}
{{- list "hub-out-of-reach" (printf "%s.model is %s, a Hugging Face id, but networkPolicies.enabled is true: serving pods reach no hub; let weights.downloads fetch it and use /models/PATH, or allow the hub in networkPolicies.extraEgress" $model.at $model.model) | toJson | nindent 0 -}}
{{- end -}}
{{- end -}}
{{- if and $w.downloads (not $w.existingClaim) (eq $w.accessMode "ReadOnlyMany") -}}
{{- list "weights-claim-read-only" (printf "weights.accessMode is ReadOnlyMany, but weights.downloads has %d entries, whose jobs write: set it to ReadWriteMany" (len $w.downloads)) | toJson | nindent 0 -}}
{{- end -}}
{{- range $i, $download := $w.downloads -}}
{{- $from := printf "weights.downloads[%d].source is %s" $i .source -}}
{{- if not $w.enabled -}}
{{- list "weights-not-enabled" (printf "%s, but weights.enabled is false: enable it" $from) | toJson | nindent 0 -}}
{{- end -}}
{{- $target := printf "/models/%s" .path -}}
{{- if has $target (slice $paths 0 $i) -}}
{{- list "weights-path-twice" (printf "weights.downloads[%d].path is %s, as of a download before it: give each a path of its own" $i .path) | toJson | nindent 0 -}}
{{- end -}}
{{- end -}}
{{- end }}
