{{- /* Checks across values. Each failure is one sentence with the values and the way out; tests/chart/test_batch_chart.py triggers each. */}}
{{- define "batch.lint" -}}
{{- if gt (len .Release.Name) 36 -}}
{{- fail (printf "the release's name %q has %d characters, Jobs leave room for 36: choose a shorter one" .Release.Name (len .Release.Name)) -}}
{{- end -}}
{{- if not .Values.target.url -}}
{{- fail "target.url is empty: set it to the service's address, like http://demo" -}}
{{- end -}}
{{- if not .Values.batch.input -}}
{{- fail "batch.input is empty: name a file of the volume, like prompts.jsonl, an absolute path, or a URL" -}}
{{- end -}}
{{- if and (contains "://" .Values.batch.input) (not (regexMatch "^(https?|s3|gs)://" .Values.batch.input)) -}}
{{- fail (printf "batch.input is %s, and the image reads s3://, gs://, http:// and https:// only: copy the file to the volume, or give a presigned https:// URL" .Values.batch.input) -}}
{{- end -}}
{{- if eq .Values.batch.input .Values.batch.output -}}
{{- fail (printf "batch.input and batch.output are both %s, and the answers would replace the prompts: give two names" .Values.batch.output) -}}
{{- end -}}
{{- if and (eq .Values.image.tag "latest") (not .Values.image.digest) -}}
{{- fail "image.tag is latest and image.digest is empty: the next pod could run another image; give a version or a digest" -}}
{{- end -}}
{{- range .Values.extraEnv -}}
{{- if and .value (regexMatch "(?i)(token$|secret|passw|api_?key|credential)" .name) -}}
{{- fail (printf "extraEnv has %s with a value, which looks like a secret, and values are no place for one: target.existingSecret takes the API key" .name) -}}
{{- end -}}
{{- end -}}
{{- if regexMatch "://[^/@]*@" (printf "%s %s %s" .Values.target.url .Values.batch.input .Values.batch.output) -}}
{{- fail "target.url, batch.input or batch.output has credentials in it, and values are no place for them: target.existingSecret takes the API key" -}}
{{- end -}}
{{- end }}
