{{- /* Checks across values. Each failure is one sentence with both values and the way out; tests/chart/test_loadtest_lint.py triggers
       each. */}}
{{- define "loadtest.lint" -}}
{{- include "loadtest.lintNames" . -}}
{{- include "loadtest.lintTarget" . -}}
{{- include "loadtest.lintScenario" . -}}
{{- include "loadtest.lintWorkers" . -}}
{{- include "loadtest.lintPods" . -}}
{{- include "loadtest.lintAdditions" . -}}
{{- include "loadtest.lintResults" . -}}
{{- include "loadtest.lintEffect" . -}}
{{- include "loadtest.lintImages" . -}}
{{- include "loadtest.lintSecrets" . -}}
{{- end }}

{{- define "loadtest.lintNames" -}}
{{- if not (regexMatch "^[a-z]([a-z0-9-]*[a-z0-9])?$" .Release.Name) -}}
{{- fail (printf "the release's name %q is no name of a Service: use a lower-case letter, then letters, digits and hyphens" .Release.Name) -}}
{{- end -}}
{{- if gt (len .Release.Name) 36 -}}
{{- fail (printf "the release's name %q has %d characters, Services and Jobs leave room for 36: choose a shorter one" .Release.Name (len .Release.Name)) -}}
{{- end -}}
{{- end }}

{{- define "loadtest.lintTarget" -}}
{{- $t := .Values.target -}}
{{- if and $t.url $t.urlSecretKey -}}
{{- fail (printf "target.url is %s and target.urlSecretKey is %s: remove one of the two" $t.url $t.urlSecretKey) -}}
{{- end -}}
{{- if not (or $t.url $t.urlSecretKey) -}}
{{- fail "target.url is empty: set it to the endpoint's address, like http://demo, or name the Secret's key that holds it in target.urlSecretKey" -}}
{{- end -}}
{{- if and $t.urlSecretKey (not $t.existingSecret) -}}
{{- fail (printf "target.urlSecretKey is %s, but target.existingSecret is empty: name the Secret" $t.urlSecretKey) -}}
{{- end -}}
{{- end }}

{{- define "loadtest.lintScenario" -}}
{{- $s := .Values.scenario -}}
{{- if not $s.arrival -}}
{{- fail "scenario is empty: give name, arrival and requests as in docs/loadtest.md, for example scenario.arrival={law: poisson, rate: 4}" -}}
{{- end -}}
{{- if and $s.workers (ne (int $s.workers) (int .Values.workers.replicas)) -}}
{{- fail (printf "scenario.workers is %v, but workers.replicas is %v: remove the former" $s.workers .Values.workers.replicas) -}}
{{- end -}}
{{- range $i, $fault := $s.faults -}}
{{- if has $fault.action (list "kill" "stop" "cut-link") -}}
{{- fail (printf "scenario.faults[%d].action is %s, but processes and links of the target are in other pods: delete a pod by kubectl beside the run, or use action: command" $i $fault.action) -}}
{{- end -}}
{{- end -}}
{{- if eq .Values.mode "job" -}}
{{- $least := addf (dig "duration_s" 60 $s) (dig "drain_s" 120 $s) .Values.job.workersWaitSeconds 300 | ceil | int64 -}}
{{- if lt (include "loadtest.deadline" . | int64) $least -}}
{{- fail (printf "job.activeDeadlineSeconds is %v, but scenario.duration_s %v + scenario.drain_s %v + job.workersWaitSeconds %v + 300 for start and report are %d: raise it, or set it to 0" .Values.job.activeDeadlineSeconds (dig "duration_s" 60 $s) (dig "drain_s" 120 $s) .Values.job.workersWaitSeconds $least) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- /* As the kit's plan counts, from the scenario's own numbers: what chance adds to a rate, and traces, it alone knows. */}}
{{- define "loadtest.lintWorkers" -}}
{{- $a := .Values.scenario.arrival -}}
{{- $rate := maxf ($a.rate | default 0) ($a.off_rate | default 0) ($a.to_rate | default 0) ($a.peak_rate | default 0) -}}
{{- if eq $a.law "diurnal" }}{{ $rate = mulf $a.rate (addf 1 ($a.amplitude | default 0)) }}{{ end -}}
{{- $weights := 0.0 -}}{{- $tokens := 0.0 -}}
{{- range .Values.scenario.requests | default (list dict) -}}
{{- $o := .output_tokens | default dict -}}{{- $weight := .weight | default 1 -}}
{{- $mean := minf ($o.mean | default 64) ($o.max | default 4096) -}}
{{- if eq ($o.dist | default "") "uniform" }}{{ $mean = divf (addf ($o.min | default 1) ($o.max | default 4096)) 2 }}{{ end -}}
{{- $weights = addf $weights $weight -}}{{- $tokens = addf $tokens (mulf $weight $mean) -}}
{{- end -}}
{{- $mean := divf $tokens $weights -}}
{{- $needed := divf (mulf $rate (maxf 1 (divf $mean 128))) .Values.workers.maxRate | ceil | int -}}
{{- if gt $needed (int .Values.workers.replicas) -}}
{{- fail (printf "workers.replicas is %v, but the scenario asks for up to %v requests/s of %v tokens, and one worker is trusted with workers.maxRate %v of 128 tokens: set workers.replicas to %d or more" .Values.workers.replicas $rate (round $mean 1) .Values.workers.maxRate $needed) -}}
{{- end -}}
{{- if eq $a.law "closed" -}}
{{- $needed := divf $a.concurrency 200 | ceil | int -}}
{{- if gt $needed (int .Values.workers.replicas) -}}
{{- fail (printf "workers.replicas is %v, but scenario.arrival.concurrency is %v, and one worker is trusted with 200 open streams: set workers.replicas to %d or more" .Values.workers.replicas $a.concurrency $needed) -}}
{{- end -}}
{{- if lt (int $a.concurrency) (int .Values.workers.replicas) -}}
{{- fail (printf "workers.replicas is %v, but scenario.arrival.concurrency is %v: some workers would have nothing to send; set workers.replicas to %v or less" .Values.workers.replicas $a.concurrency $a.concurrency) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "loadtest.lintResults" -}}
{{- $r := .Values.results -}}
{{- if and (eq .Values.mode "job") (not $r.persistence.enabled) (not $r.s3.uri) -}}
{{- fail "mode is job, results.persistence.enabled is false and results.s3.uri is empty: records and report would vanish with the pod; enable one of the two" -}}
{{- end -}}
{{- if and (eq .Values.mode "web") $r.s3.uri -}}
{{- fail (printf "results.s3.uri is %s, but mode is web, and only a Job uploads: remove it, or set mode to job" $r.s3.uri) -}}
{{- end -}}
{{- end }}

{{- define "loadtest.lintImages" -}}
{{- range $path, $image := dict "image" .Values.image "results.s3.image" .Values.results.s3.image -}}
{{- if and (eq $image.tag "latest") (not $image.digest) -}}
{{- fail (printf "%s.tag is latest and %s.digest is empty: master and workers could run different images; give a version or a digest" $path $path) -}}
{{- end -}}
{{- if regexMatch ":[^/]+$" $image.repository -}}
{{- fail (printf "%s.repository is %q and %s.tag is %q: put the tag of the former into the latter" $path $image.repository $path $image.tag) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "loadtest.lintSecrets" -}}
{{- range .Values.extraEnv -}}
{{- if and .value (regexMatch "(?i)(token$|secret|passw|api_?key|credential)" .name) -}}
{{- fail (printf "extraEnv has %s with a value, which looks like a secret, and values are no place for one: target.existingSecret takes the API key, extraVolumes any other file" .name) -}}
{{- end -}}
{{- end -}}
{{- if regexMatch "://[^/@]*@" .Values.target.url -}}
{{- fail "target.url has credentials in it, and values are no place for them: put the address into a Secret and name its key in target.urlSecretKey" -}}
{{- end -}}
{{- $known := "(hf_[A-Za-z0-9]{30,}|AKIA[0-9A-Z]{16}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{30,}|-----BEGIN [A-Z ]*PRIVATE KEY)" -}}
{{- with regexFind $known (toJson .Values) -}}
{{- fail (printf "the values hold something that looks like a secret (%s...), and values are no place for one: put it into a Secret" (trunc 6 .)) -}}
{{- end -}}
{{- end }}
