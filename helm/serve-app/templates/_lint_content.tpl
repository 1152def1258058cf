{{- define "serve-app.lintImages" -}}
{{- range $path, $image := dict "image" .Values.image "gcsFaultTolerance.redis.image" .Values.gcsFaultTolerance.redis.image "weights.s3Image" .Values.weights.s3Image -}}
{{- if and (eq $image.tag "latest") (not $image.digest) -}}
{{- fail (printf "%s.tag is latest and %s.digest is empty: pods of one release would run different images; give a version or a digest" $path $path) -}}
{{- end -}}
{{- if regexMatch ":[^/]+$" $image.repository -}}
{{- fail (printf "%s.repository is %q and %s.tag is %q: put the tag of the former into the latter" $path $image.repository $path $image.tag) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- /* Values end up in the release's history, in serveConfigV2 and in dashboards: no place for secrets. */}}
{{- define "serve-app.lintSecrets" -}}
{{- $secret := "(?i)(token|secret|passw|api_?key|credential)" -}}
{{- range $i, $model := .Values.config.models -}}
{{- range $name, $value := $model.env | default dict -}}
{{- if regexMatch $secret $name -}}
{{- fail (printf "config.models[%d].env.%s looks like a secret, and values are no place for one: weights.huggingFaceTokenSecret takes the token of a gated model, modelPods.extraVolumes any other file" $i $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $all := dict "head" .Values.head "ingressPods" .Values.ingressPods "modelPods" .Values.modelPods -}}
{{- range $name, $pods := .Values.modelPods.byModel -}}{{- $_ := set $all (printf "modelPods.byModel.%s" $name) $pods -}}{{- end -}}
{{- range $path, $pods := $all -}}
{{- range $pods.extraEnv -}}
{{- if and .value (regexMatch $secret .name) -}}
{{- fail (printf "extraEnv of %s has %s with a value, which looks like a secret, and values are no place for one: use valueFrom.secretKeyRef, or better a file through extraVolumes" $path .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if regexMatch "://[^/@]*:[^/@]+@" .Values.gcsFaultTolerance.address -}}
{{- fail "gcsFaultTolerance.address has a password in it, and values are no place for one: put it into a Secret and name that in gcsFaultTolerance.existingSecret" -}}
{{- end -}}
{{- $known := "(hf_[A-Za-z0-9]{30,}|AKIA[0-9A-Z]{16}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{30,}|-----BEGIN [A-Z ]*PRIVATE KEY)" -}}
{{- with regexFind $known (toJson .Values) -}}
{{- fail (printf "the values hold something that looks like a secret (%s...), and values are no place for one: put it into a Secret" (trunc 6 .)) -}}
{{- end -}}
{{- end }}

{{- /* Serving pods reach no model hub: what they load is in the image, or in the weights volume. */}}
{{- define "serve-app.lintWeights" -}}
{{- $open := or (not .Values.networkPolicies.enabled) .Values.networkPolicies.extraEgress -}}
{{- range $i, $model := .Values.config.models -}}
{{- if and (hasPrefix "/models/" $model.model) (not $.Values.weights.enabled) -}}
{{- fail (printf "config.models[%d].model is %s, but weights.enabled is false: enable it, and fetch the weights there or name an existing claim" $i $model.model) -}}
{{- end -}}
{{- if not (or (hasPrefix "/" $model.model) (hasPrefix "embedded:" $model.model) $open) -}}
{{- fail (printf "config.models[%d].model is %s, a Hugging Face id, but networkPolicies.enabled is true: serving pods reach no hub; let weights.downloads fetch it and use /models/PATH, or allow the hub in networkPolicies.extraEgress" $i $model.model) -}}
{{- end -}}
{{- end -}}
{{- range $i, $download := .Values.weights.downloads -}}
{{- if not $.Values.weights.enabled -}}
{{- fail (printf "weights.downloads[%d].source is %s, but weights.enabled is false: enable it" $i $download.source) -}}
{{- end -}}
{{- if and (hasPrefix "hf:" $download.source) (not $download.revision) -}}
{{- fail (printf "weights.downloads[%d].source is %s, but revision is empty: give the commit, or the weights change under you" $i $download.source) -}}
{{- end -}}
{{- if and (hasPrefix "s3://" $download.source) (not $download.sha256) -}}
{{- fail (printf "weights.downloads[%d].source is %s, but sha256 is empty: give the checksum of its SHA256SUMS file" $i $download.source) -}}
{{- end -}}
{{- end -}}
{{- end }}
