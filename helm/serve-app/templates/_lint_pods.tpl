{{- /* What the tables of files/lints/pods.yaml judge: resources, labels, accounts, and what values add to pods. Args of all but the last:
in, as of serve-app.judge. */}}

{{- /* A quantity of Kubernetes as a number. */}}
{{- define "serve-app.quantity" -}}
{{- $number := regexFind "^[0-9.]+(e[+][0-9]+)?" (toString .) -}}
{{- $units := dict "" 1 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{ mulf $number (index $units (trimPrefix $number (toString .))) }}
{{- end }}

{{- /* Every container that values give resources. A model's settings are judged as its pods get them. */}}
{{- define "serve-app.lintPods" -}}
{{- $in := . -}}{{- $v := .root.Values -}}
{{- $all := list -}}
{{- range $path, $pods := dict "head" $v.head "ingressPods" $v.ingressPods "autoscaler" $v.autoscaler
    "gcsFaultTolerance.redis" $v.gcsFaultTolerance.redis "weights" $v.weights "test" $v.test "check" $v.check -}}
{{- $all = append $all (dict "path" $path "pods" $pods "whose" "") -}}
{{- end -}}
{{- $labels := dict "commonLabels" $v.commonLabels "head.podLabels" $v.head.podLabels "ingressPods.podLabels" $v.ingressPods.podLabels
    "gcsFaultTolerance.redis.podLabels" $v.gcsFaultTolerance.redis.podLabels "jobs.podLabels" $v.jobs.podLabels -}}
{{- $annotations := dict "modelPods" ($v.modelPods.podAnnotations | default dict) -}}
{{- range .groups -}}
{{- $_ := set $labels (printf "%s.podLabels" .path) .pods.podLabels -}}
{{- $_ := set $annotations (printf "%s.pods" .model.at) (dig "podAnnotations" dict (.model.pods | default dict) | default dict) -}}
{{- $all = append $all (dict "path" .path "pods" .pods "whose" (printf " for %s" .model.at)) -}}
{{- include "serve-app.judge" (dict "in" $in "table" "checkpoints" "model" .model "pods" .pods "path" .path
    "memory" (dig "limits" "memory" "" .pods.resources) "least" (include "serve-app.readAheadGi" .pods | int64)) -}}
{{- include "serve-app.judge" (dict "in" $in "table" "offloads" "model" .model "pods" .pods "path" .path
    "memory" (dig "limits" "memory" "" .pods.resources) "gi" (include "serve-app.offloadGi" .model | int64)) -}}
{{- end -}}
{{- range $all -}}
{{- $of := . -}}
{{- range $name, $request := .pods.resources.requests -}}
{{- include "serve-app.judge" (dict "in" $in "table" "requests" "path" $of.path "whose" $of.whose "name" $name "request" $request
    "limit" (get ($of.pods.resources.limits | default dict) $name)) -}}
{{- end -}}
{{- include "serve-app.judge" (dict "in" $in "table" "objects" "path" .path "whose" .whose "shm" (get .pods "shmSize")) -}}
{{- end -}}
{{- range $path, $given := $annotations -}}
{{- include "serve-app.judge" (dict "in" $in "table" "evictions" "path" $path "annotations" $given) -}}
{{- end -}}
{{- range $name, $_ := $v.commonAnnotations -}}
{{- include "serve-app.judge" (dict "in" $in "table" "annotations" "name" $name) -}}
{{- end -}}
{{- range $path, $given := $labels -}}
{{- range $name, $_ := $given -}}
{{- include "serve-app.judge" (dict "in" $in "table" "labels" "path" $path "name" $name) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "serve-app.lintAccounts" -}}
{{- $in := . -}}
{{- $taken := dict -}}
{{- range $account, $_ := .root.Values.serviceAccounts -}}
{{- $name := include "serve-app.account" (dict "root" $in.root "account" $account) -}}
{{- include "serve-app.judge" (dict "in" $in "table" "accounts" "account" $account "name" $name "other" (get $taken $name)) -}}
{{- $_ := set $taken $name $account -}}
{{- end -}}
{{- end }}

{{- /* What values added to the pods, judged in the pods that came of it. */}}
{{- define "serve-app.lintAdditions" -}}
{{- $in := . -}}
{{- $pods := dict "head" (include "serve-app.headGroup" .root | fromYaml).template
    "ingressPods" (include "serve-app.ingressGroup" .root | fromYaml).template -}}
{{- range .groups -}}
{{- $_ := set $pods .path (include "serve-app.modelGroup" (dict "root" $in.root "model" .model) | fromYaml).template -}}
{{- end -}}
{{- range .root.Values.weights.downloads -}}
{{- $_ := set $pods "weights" (include "serve-app.weightsPod" (dict "root" $in.root "download" .) | fromYaml) -}}
{{- end -}}
{{- range $path, $pod := $pods -}}
{{- include "serve-app.lintPodTemplate" (dict "in" $in "path" $path "spec" $pod.spec) -}}
{{- end -}}
{{- end }}

{{- /* The root of an ingress pod is read-only: what it writes lies below a mount. Of two mounts above a folder the longer one counts. */}}
{{- define "serve-app.lintFolders" -}}
{{- $in := . -}}
{{- $pod := (include "serve-app.ingressGroup" .root | fromYaml).template.spec -}}
{{- range $key := list "batch" "ledger" -}}
{{- with (dig "ingress" $key dict $in.root.Values.config | default dict).dir -}}
{{- $folder := clean . -}}{{- $longest := "" -}}{{- $is_writable := false -}}
{{- range (first $pod.containers).volumeMounts -}}
{{- $mount := clean .mountPath -}}
{{- if and (hasPrefix (printf "%s/" $mount) (printf "%s/" $folder)) (gt (len $mount) (len $longest)) -}}
{{- $longest = $mount -}}{{- $is_writable = not .readOnly -}}
{{- end -}}
{{- end -}}
{{- include "serve-app.judge" (dict "in" $in "table" "folders" "key" $key "dir" . "is_writable" $is_writable
    "ingresses" (dig "ingress" "replicas" "max" 1 $in.root.Values.config | int)) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- /* Args: in, path (of the values), spec (of the pod). */}}
{{- define "serve-app.lintPodTemplate" -}}
{{- $in := .in -}}{{- $path := .path -}}
{{- $main := first .spec.containers -}}
{{- $volumes := list -}}
{{- range .spec.volumes }}{{ $volumes = append $volumes .name }}{{ end -}}
{{- range $main.env -}}
{{- if eq .name "NVIDIA_VISIBLE_DEVICES" -}}
{{- include "serve-app.judge" (dict "in" $in "table" "variables" "path" $path "variable" .) -}}
{{- end -}}
{{- end -}}
{{- range list (list "extraEnv" "name" $main.env) (list "extraVolumes" "name" .spec.volumes)
    (list "extraVolumeMounts" "mountPath" $main.volumeMounts)
    (list "extra.containers or extra.initContainers" "name" (concat .spec.containers (.spec.initContainers | default list))) -}}
{{- $where := index . 0 -}}{{- $key := index . 1 -}}
{{- $names := list -}}
{{- range index . 2 }}{{ $names = append $names (index . $key) }}{{ end -}}
{{- include "serve-app.judge" (dict "in" $in "table" "names" "path" $path "where" $where "key" $key "names" $names) -}}
{{- end -}}
{{- range $main.volumeMounts -}}
{{- include "serve-app.judge" (dict "in" $in "table" "mounts" "path" $path "mount" . "volumes" $volumes) -}}
{{- end -}}
{{- end }}

{{- /* The entries of a list that are there twice, in a sentence. */}}
{{- define "serve-app.twice" -}}
{{- $seen := list -}}{{- $twice := list -}}
{{- range . }}{{ if has . $seen }}{{ $twice = append $twice . }}{{ else }}{{ $seen = append $seen . }}{{ end }}{{ end -}}
{{ uniq $twice | join " and " }}
{{- end }}
