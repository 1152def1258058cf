{{- /* A quantity of Kubernetes as a number. */}}
{{- define "serve-app.quantity" -}}
{{- $number := regexFind "^[0-9.]+(e[+][0-9]+)?" (toString .) -}}
{{- $units := dict "" 1 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{ mulf $number (index $units (trimPrefix $number (toString .))) }}
{{- end }}

{{- /* Every container that values give resources. A model's settings are judged as its pods get them. */}}
{{- define "serve-app.lintPods" -}}
{{- $v := .Values -}}
{{- range $path, $pods := dict "head" $v.head "ingressPods" $v.ingressPods "autoscaler" $v.autoscaler
    "gcsFaultTolerance.redis" $v.gcsFaultTolerance.redis "weights" $v.weights "test" $v.test "check" $v.check -}}
{{- include "serve-app.lintPod" (dict "root" $ "path" $path "pods" $pods "whose" "") -}}
{{- end -}}
{{- $labels := dict "commonLabels" $v.commonLabels "head.podLabels" $v.head.podLabels "ingressPods.podLabels" $v.ingressPods.podLabels
    "gcsFaultTolerance.redis.podLabels" $v.gcsFaultTolerance.redis.podLabels "weights.podLabels" $v.weights.podLabels
    "test.podLabels" $v.test.podLabels "check.podLabels" $v.check.podLabels "uninstall.podLabels" $v.uninstall.podLabels -}}
{{- range $model := include "serve-app.groups" $ | fromYamlArray -}}
{{- $path := ternary (printf "%s.pods" $model.at) "modelPods" (hasKey $model "pods") -}}
{{- $pods := include "serve-app.modelPods" (dict "root" $ "model" $model) | fromYaml -}}
{{- include "serve-app.lintPod" (dict "root" $ "path" $path "pods" $pods "whose" (printf " for %s" $model.at)) -}}
{{- $least := include "serve-app.readAheadGi" $pods | int64 -}}
{{- $memory := dig "limits" "memory" "" $pods.resources -}}
{{- if and $memory (eq (dig "device" "cpu" $model) "cuda") (lt (include "serve-app.quantity" $memory | float64) (mulf $least 1073741824)) -}}
{{- list "checkpoint-above-memory" (printf "%s.checkpointSize is %v, but %s.resources.limits.memory is %v for %s: vLLM reads a checkpoint ahead only where it fits 90 %% of the free memory, and would load it piece by piece over the network; raise the latter above %dGi" $path $pods.checkpointSize $path $memory $model.at $least) | toJson | nindent 0 -}}
{{- end -}}
{{- $_ := set $labels (printf "%s.podLabels" $path) $pods.podLabels -}}
{{- end -}}
{{- range $name, $_ := $v.commonAnnotations -}}
{{- if regexMatch "^(meta[.])?helm[.]sh/" $name -}}
{{- list "annotation-of-helm" (printf "commonAnnotations has %s, which would change what Helm does with every object: remove it" $name) | toJson | nindent 0 -}}
{{- end -}}
{{- end -}}
{{- range $path, $given := $labels -}}
{{- range $label, $_ := $given -}}
{{- if regexMatch "^((app[.]kubernetes|helm)[.](io|sh)/(name|instance|component|version|managed-by|chart)$|(ray[.]io|serve-app)/)" $label -}}
{{- list "label-of-chart" (printf "%s has %s, which the chart sets, and by which Services, policies and budgets find the pods: remove it, or use another name" $path $label) | toJson | nindent 0 -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- /* Args: root, path, pods (settings), whose (" for config.models.NAME", or ""). */}}
{{- define "serve-app.lintPod" -}}
{{- $path := .path -}}{{- $pods := .pods -}}{{- $whose := .whose -}}
{{- range $name, $request := $pods.resources.requests -}}
{{- $limit := index ($pods.resources.limits | default dict) $name -}}
{{- if and $limit (gt (include "serve-app.quantity" $request | float64) (include "serve-app.quantity" $limit | float64)) -}}
{{- list "request-above-limit" (printf "%s.resources.requests.%s is %v, but %s.resources.limits.%s is %v%s: Kubernetes would refuse the pod; raise the latter" $path $name $request $path $name $limit $whose) | toJson | nindent 0 -}}
{{- end -}}
{{- end -}}
{{- $bytes := .root.Values.objectStore.bytes -}}
{{- if and $pods.shmSize (gt (float64 $bytes) (include "serve-app.quantity" $pods.shmSize | float64)) -}}
{{- list "objects-above-shm" (printf "objectStore.bytes is %d, but %s.shmSize is %v%s: Ray would keep its objects on disk; raise the latter" (int64 $bytes) $path $pods.shmSize $whose) | toJson | nindent 0 -}}
{{- end -}}
{{- end }}

{{- define "serve-app.lintAccounts" -}}
{{- $taken := dict -}}
{{- range $account, $_ := .Values.serviceAccounts -}}
{{- $name := include "serve-app.account" (dict "root" $ "account" $account) -}}
{{- with get $taken $name -}}
{{- list "account-twice" (printf "serviceAccounts.%s and serviceAccounts.%s are both %s, and KubeRay binds the rights of its autoscaler to the head's: give each a name of its own" . $account $name) | toJson | nindent 0 -}}
{{- end -}}
{{- $_ := set $taken $name $account -}}
{{- end -}}
{{- end }}

{{- /* What values added to the pods, judged in the pods that came of it. */}}
{{- define "serve-app.lintAdditions" -}}
{{- $pods := dict "head" (include "serve-app.headGroup" . | fromYaml).template "ingressPods" (include "serve-app.ingressGroup" . | fromYaml).template -}}
{{- range $model := include "serve-app.groups" . | fromYamlArray -}}
{{- $path := ternary (printf "%s.pods" $model.at) "modelPods" (hasKey $model "pods") -}}
{{- $_ := set $pods $path (include "serve-app.modelGroup" (dict "root" $ "model" $model) | fromYaml).template -}}
{{- end -}}
{{- range .Values.weights.downloads -}}
{{- $_ := set $pods "weights" (include "serve-app.weightsPod" (dict "root" $ "download" .) | fromYaml) -}}
{{- end -}}
{{- range $path, $pod := $pods -}}
{{- include "serve-app.lintPodTemplate" (dict "path" $path "spec" $pod.spec) -}}
{{- end -}}
{{- end }}

{{- /* The root of an ingress pod is read-only: what it writes lies below a mount. Of two mounts above a folder the longer one counts. */}}
{{- define "serve-app.lintFolders" -}}
{{- $pod := (include "serve-app.ingressGroup" . | fromYaml).template.spec -}}
{{- range $key := list "batch" "ledger" -}}
{{- with (dig "ingress" $key dict $.Values.config | default dict).dir -}}
{{- $folder := clean . -}}{{- $longest := "" -}}{{- $is_writable := false -}}
{{- range (first $pod.containers).volumeMounts -}}
{{- $mount := clean .mountPath -}}
{{- if and (hasPrefix (printf "%s/" $mount) (printf "%s/" $folder)) (gt (len $mount) (len $longest)) -}}
{{- $longest = $mount -}}{{- $is_writable = not .readOnly -}}
{{- end -}}
{{- end -}}
{{- if not $is_writable -}}
{{- list "folder-not-writable" (printf "config.ingress.%s.dir is %s, but the pod's root is read-only, and ingressPods.extraVolumeMounts mounts nothing there that it may write to: add a volume to ingressPods.extraVolumes, and mount it there or above" $key .) | toJson | nindent 0 -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- /* Args: path (of the values), spec (of the pod). */}}
{{- define "serve-app.lintPodTemplate" -}}
{{- $path := .path -}}
{{- $main := first .spec.containers -}}
{{- $volumes := list -}}
{{- range .spec.volumes }}{{ $volumes = append $volumes .name }}{{ end -}}
{{- if ne $path "weights" -}}
{{- range $main.env -}}
{{- if and (eq .name "NVIDIA_VISIBLE_DEVICES") (ne (toString .value) "void") -}}
{{- list "gpu-visibility" (printf "%s.extraEnv has NVIDIA_VISIBLE_DEVICES, but the device plugin sets it in pods of models with gpus_per_replica, and the chart to void in all others: remove it" $path) | toJson | nindent 0 -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range list (list "extraEnv" "name" $main.env) (list "extraVolumes" "name" .spec.volumes) (list "extraVolumeMounts" "mountPath" $main.volumeMounts)
    (list "extraContainers or extraInitContainers" "name" (concat .spec.containers (.spec.initContainers | default list))) -}}
{{- $taken := list -}}{{- $where := index . 0 -}}{{- $key := index . 1 -}}
{{- range index . 2 -}}
{{- if has (index . $key) $taken -}}
{{- list "name-twice" (printf "%s.%s has the %s %s, which the chart uses itself, or which is there twice: remove it, or choose another" $path $where $key (index . $key)) | toJson | nindent 0 -}}
{{- end -}}
{{- $taken = append $taken (index . $key) -}}
{{- end -}}
{{- end -}}
{{- range $main.volumeMounts -}}
{{- if not (has .name $volumes) -}}
{{- list "mount-without-volume" (printf "%s.extraVolumeMounts mounts %s at %s, but %s.extraVolumes has no volume of that name: add it there" $path .name .mountPath $path) | toJson | nindent 0 -}}
{{- end -}}
{{- end -}}
{{- end }}
