{{- define "serve-app.headGroup" -}}
{{- $pods := .Values.head -}}
{{- $args := dict "root" . "component" "head" "pods" $pods "container" "ray-head" "account" "head" "priority" "head"
    "affinity" $pods.affinity "resources" $pods.resources "preStop" $pods.preStopSleepSeconds "rayDrain" "0"
    "grace" (add $pods.preStopSleepSeconds 30) -}}
{{- $_ := set $args "ports" (list
    (dict "name" "gcs-server" "containerPort" 6379) (dict "name" "dashboard" "containerPort" 8265)
    (dict "name" "metrics" "containerPort" 8080)) -}}
{{- $_ := set $args "readiness" (dict "httpGet" (dict "path" "/api/healthz" "port" 52365)
    "initialDelaySeconds" 10 "periodSeconds" 5 "timeoutSeconds" 5 "failureThreshold" 10) -}}
{{- $_ := set $args "livenessFailures" 48 -}}{{- /* 4 minutes: a head whose GCS ended during its start never answers, and the cluster serves no request */ -}}
{{- $_ := set $args "mounts" (list (dict "name" "ray-logs" "mountPath" "/tmp/ray")) -}}
{{- $_ := set $args "volumes" (include "serve-app.autoscalerVolumes" . | fromYamlArray) -}}
rayStartParams:
  num-cpus: "0"
  num-gpus: "0" # given, or Ray would count the GPUs that it finds
  dashboard-host: 0.0.0.0
  {{- include "serve-app.rayPorts" . | nindent 2 }}
template:
  {{- include "serve-app.rayPod" $args | nindent 2 }}
{{- end }}

{{- /* The logs that the autoscaler shares with the head, its own /tmp, and the token that only it mounts. */}}
{{- define "serve-app.autoscalerVolumes" -}}
- name: ray-logs
  emptyDir: {sizeLimit: {{ .Values.head.tmpSize }}}
- name: autoscaler-tmp
  emptyDir: {sizeLimit: 256Mi}
{{ include "serve-app.apiAccessVolume" . }}
{{- end }}

{{- /* Of each log file, so that /tmp cannot fill: Ray would keep six of 512 MB. */}}
{{- define "serve-app.logRotation" -}}
- {name: RAY_ROTATION_MAX_BYTES, value: "33554432"}
- {name: RAY_ROTATION_BACKUP_COUNT, value: "2"}
{{- end }}

{{- define "serve-app.autoscalerOptions" -}}
version: v2
idleTimeoutSeconds: {{ .Values.autoscaler.idleTimeoutSeconds }}
upscalingMode: Default
imagePullPolicy: {{ .Values.image.pullPolicy }}
env:
  {{- include "serve-app.logRotation" . | nindent 2 }}
  {{- include "serve-app.noGpusEnv" . | nindent 2 }}
resources:
  {{- toYaml .Values.autoscaler.resources | nindent 2 }}
securityContext:
  {{- include "serve-app.securityContext" . | nindent 2 }}
volumeMounts:
  - {name: autoscaler-tmp, mountPath: /tmp}
  - {name: ray-logs, mountPath: /tmp/ray}
  - {name: kube-api-access, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}
{{- end }}

{{- define "serve-app.groupBounds" -}}
# Serve decides how many there are, by the bounds of config.ingress.replicas and config.models.NAME.replicas. Pods beyond maxReplicas
# would be stopped whatever they do. `replicas` is where a new Ray cluster starts; in a running one it takes no pod away.
minReplicas: 0
maxReplicas: 10000
{{- end }}

{{- /* The size limit of an ingress pod's /tmp. Ingresses that share batches keep there what they receive, read and send of the files. */}}
{{- define "serve-app.ingressTmpSize" -}}
{{- $batch := dig "ingress" "batch" dict .Values.config | default dict -}}
{{- $stored := ternary (dig "max_stored_bytes" 21474836480 $batch) 0 (hasKey $batch "files") | int64 -}}
{{ .Values.ingressPods.tmpSize | default (printf "%dGi" (add 4 (div (add $stored 1073741823) 1073741824))) }}
{{- end }}

{{- define "serve-app.ingressGroup" -}}
{{- $pods := set (deepCopy .Values.ingressPods) "tmpSize" (include "serve-app.ingressTmpSize" .) -}}
{{- $t := include "serve-app.timeouts" . | fromYaml -}}
{{- $replicas := dig "ingress" "replicas" dict .Values.config -}}
{{- $min := dig "min" 1 $replicas | int -}}
{{- $port := dig "ingress" "port" 8010 .Values.config | int -}}
{{- $labels := set (include "serve-app.selectorLabels" . | fromYaml) "app.kubernetes.io/component" "ingress" -}}
{{- $args := dict "root" . "component" "ingress" "pods" $pods "group" $labels "container" "ray-worker" "account" "worker"
    "priority" "worker" "affinity" $pods.affinity "resources" $pods.resources
    "preStop" .Values.timeouts.preStopSleepSeconds "grace" $t.grace "rayDrain" $t.rayDrain -}}
{{- $_ := set $args "ports" (list (dict "name" "http" "containerPort" $port) (dict "name" "metrics" "containerPort" 8080)) -}}
{{- $_ := set $args "readiness" (dict "httpGet" (dict "path" "/readyz" "port" "http")
    "periodSeconds" 2 "timeoutSeconds" 2 "failureThreshold" 2) -}}
{{- $mounts := include "serve-app.clusterTokenMounts" . | fromYamlArray -}}
{{- $volumes := include "serve-app.clusterTokenVolumes" . | fromYamlArray -}}
{{- with include "serve-app.keysFrom" . -}}
{{- $secret := ternary "serve-app.tenantsSecret" "serve-app.apiKeysSecret" (eq . "tenants") -}}
{{- $mounts = append $mounts (dict "name" . "mountPath" (printf "/etc/serve-app/%s" .) "readOnly" true) -}}
{{- $volumes = append $volumes (dict "name" . "secret" (dict "secretName" (include $secret $) "defaultMode" 288)) -}}
{{- end -}}
{{- if .Values.batches.databaseSecret -}}
{{- $mounts = append $mounts (dict "name" "batch-database" "mountPath" "/etc/serve-app/batch-database" "readOnly" true) -}}
{{- $volumes = append $volumes (dict "name" "batch-database"
    "secret" (dict "secretName" .Values.batches.databaseSecret "defaultMode" 288)) -}}
{{- end -}}
{{- $_ := set $args "mounts" $mounts -}}
{{- $_ := set $args "volumes" $volumes -}}
{{- if .Values.weights.enabled -}}
{{- $_ := set $args "initContainers" (include "serve-app.weightsWait" (dict "root" . "downloads" .Values.weights.downloads)) -}}
{{- end -}}
groupName: ingress
replicas: {{ $min }}
{{ include "serve-app.groupBounds" . }}
rayStartParams:
  num-cpus: {{ dig "ingress" "num_cpus" 1 .Values.config | ceil | int | max 1 | quote }}
  num-gpus: "0"
  resources: '"{\"serve_app_ingress\": 1}"'
  {{- include "serve-app.rayPorts" . | nindent 2 }}
template:
  {{- include "serve-app.rayPod" $args | nindent 2 }}
{{- end }}

{{- /* Args: root, model. */}}
{{- define "serve-app.modelGroup" -}}
{{- $pods := include "serve-app.modelPods" . | fromYaml -}}
{{- $t := include "serve-app.timeouts" .root | fromYaml -}}
{{- $sharing := include "serve-app.sharing" .model | int -}}
{{- /* No sleep before SIGTERM: no Service sends to these pods, and of a spot notice each second counts. */ -}}
{{- $args := dict "root" .root "component" "model" "pods" $pods "container" "ray-worker" "account" "worker" "priority" "worker"
    "preStop" 0 "grace" $t.grace "rayDrain" $t.rayDrain -}}
{{- $args = merge $args (include "serve-app.modelPlacement" . | fromYaml) -}}
{{- $links := dict "first" (dig "protocol" "port" 8020 .root.Values.config | int) "number" $sharing -}}
{{- $_ := set $args "ports" (append (include "serve-app.linkPorts" $links | fromJsonArray) (dict "name" "metrics" "containerPort" 8080)) -}}
{{- $_ := set $args "readiness" (dict "tcpSocket" (dict "port" "link") "periodSeconds" 5 "timeoutSeconds" 2) -}}
{{- /* A simulated engine runs in its first pod alone, and of the engines that share a pod any may be gone. */ -}}
{{- if or (gt $sharing 1) (and (gt (int $pods.nodes) 1) .model.simulated) -}}
{{- $_ := set $args "readiness" (dict "httpGet" (dict "path" "/api/healthz" "port" 52365) "periodSeconds" 5 "timeoutSeconds" 2) -}}
{{- end -}}
{{- $_ := set $args "mounts" (include "serve-app.clusterTokenMounts" .root | fromYamlArray) -}}
{{- $_ := set $args "volumes" (include "serve-app.clusterTokenVolumes" .root | fromYamlArray) -}}
{{- if .root.Values.weights.enabled -}}
{{- $mine := list -}}
{{- $named := toJson $.model -}}{{- /* a draft model among the arguments, too */ -}}
{{- range .root.Values.weights.downloads -}}
{{- if regexMatch (printf "\"/models/%s[\"/]" (regexQuoteMeta .path)) $named -}}{{- $mine = append $mine . -}}{{- end -}}
{{- end -}}
{{- $_ := set $args "initContainers" (include "serve-app.weightsWait" (dict "root" .root "downloads" $mine)) -}}
{{- end -}}
groupName: {{ .model.group }}
{{- /* Pods, of which Ray takes one for each node of a replica. Not KubeRay's numOfHosts: with one pod of such a set of hosts KubeRay deletes
the others, and Ray may have placed a replica on pods of two sets. */}}
replicas: {{ ternary (include "serve-app.replicasFor" (dict "model" .model "key" "initial") | int | mul $pods.nodes) 0 .model.served }}
{{ include "serve-app.groupBounds" . }}
rayStartParams:
  num-cpus: {{ dig "num_cpus" 1 .model | ceil | int | max 1 | mul $sharing | quote }}
  num-gpus: {{ int $pods.gpus | quote }}
  resources: '"{\"{{ .model.resource }}\": {{ $sharing }}}"'
  {{- include "serve-app.rayPorts" .root | nindent 2 }}
template:
  {{- include "serve-app.rayPod" $args | nindent 2 }}
{{- end }}
