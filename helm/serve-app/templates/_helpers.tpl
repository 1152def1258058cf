{{- /* Names, labels, secrets and security contexts. */}}

{{- /* What the release's objects are called: this, or this and a suffix. It has at most 41 characters. Names of Services, pods and the values
of labels have 63 at most, so their suffixes have up to 22; names of other objects may have 253. */}}
{{- define "serve-app.fullname" -}}
{{ .Values.fullnameOverride | default .Release.Name }}
{{- end }}

{{- /* Metadata of an object. Args: root; for a name other than the release's, either `name`, a suffix to it, or `whole`, all of it; if any:
labels, annotations. */}}
{{- define "serve-app.metadata" -}}
{{- $fullname := include "serve-app.fullname" .root -}}
name: {{ .whole | default (ternary (printf "%s-%s" $fullname .name) $fullname (hasKey . "name")) | quote }}
labels:
  {{- merge (include "serve-app.labels" .root | fromYaml) (.labels | default dict) | toYaml | nindent 2 }}
{{- with merge (dict) (.annotations | default dict) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* The name of an account. Args: root, account (a key of serviceAccounts). */}}
{{- define "serve-app.account" -}}
{{ (index .root.Values.serviceAccounts .account).name | default (printf "%s-%s" (include "serve-app.fullname" .root) .account) }}
{{- end }}

{{- define "serve-app.selectorLabels" -}}
app.kubernetes.io/name: serve-app
app.kubernetes.io/instance: {{ include "serve-app.fullname" . | quote }}
{{- end }}

{{- /* Labels of objects. Pods get only selectorLabels: a chart version there would make a new Ray cluster of each upgrade. */}}
{{- define "serve-app.labels" -}}
{{ include "serve-app.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* Labels of a pod but for its component. Args: root, pods (settings with podLabels). */}}
{{- define "serve-app.podLabels" -}}
{{ merge (include "serve-app.selectorLabels" .root | fromYaml) (.pods.podLabels | default dict) .root.Values.commonLabels | toYaml }}
{{- end }}

{{- /* For containers that hold no GPU. Bases of CUDA say `all`, which a node whose default runtime is NVIDIA's takes at its word. Where a
GPU is held, its device plugin sets the variable. */}}
{{- define "serve-app.noGpusEnv" -}}
- {name: NVIDIA_VISIBLE_DEVICES, value: void}
{{- end }}

{{- define "serve-app.clusterTokenSecret" -}}
{{ .Values.clusterToken.existingSecret | default (printf "%s-cluster-token" (include "serve-app.fullname" .)) }}
{{- end }}

{{- define "serve-app.rayTokenSecret" -}}
{{ .Values.rayToken.existingSecret | default (printf "%s-ray-token" (include "serve-app.fullname" .)) }}
{{- end }}

{{- define "serve-app.apiKeysSecret" -}}
{{ .Values.apiKeys.existingSecret | default (printf "%s-api-keys" (include "serve-app.fullname" .)) }}
{{- end }}

{{- define "serve-app.weightsClaim" -}}
{{ .Values.weights.existingClaim | default (printf "%s-weights" (include "serve-app.fullname" .)) }}
{{- end }}

{{- /* The value of a generated secret: what is in the cluster, else new. Args: root, name, key, new. */}}
{{- define "serve-app.kept" -}}
{{- $secret := lookup "v1" "Secret" .root.Release.Namespace .name | default dict -}}
{{- with index ($secret.data | default dict) .key -}}
{{ b64dec . }}
{{- else -}}
{{ .new }}
{{- end -}}
{{- end }}

{{- /* Args: root, name, override. The priority class of a pod, as a whole line or nothing. */}}
{{- define "serve-app.priorityClass" -}}
{{- if .override -}}
priorityClassName: {{ .override | quote }}
{{- else if .root.Values.priorityClasses.create -}}
priorityClassName: {{ include "serve-app.priorityClassName" . }}
{{- end -}}
{{- end }}

{{- /* The chart's own, by a name that no release of another namespace has: it belongs to the whole cluster. Args: root, name. */}}
{{- define "serve-app.priorityClassName" -}}
{{ include "serve-app.fullname" .root }}-{{ .name }}.{{ .root.Release.Namespace }}
{{- end }}

{{- define "serve-app.podSecurityContext" -}}
{{- with .Values.podSecurityContext -}}
{{ toYaml . }}
{{- else -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}
{{- end }}

{{- define "serve-app.securityContext" -}}
runAsNonRoot: true
allowPrivilegeEscalation: false
privileged: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- /* What automounting would mount, for the one container that needs it. */}}
{{- define "serve-app.apiAccessVolume" -}}
- name: kube-api-access
  projected:
    defaultMode: 0440
    sources:
      - serviceAccountToken: {path: token, expirationSeconds: 3607}
      - configMap:
          name: kube-root-ca.crt
          items: [{key: ca.crt, path: ca.crt}]
      - downwardAPI:
          items: [{path: namespace, fieldRef: {apiVersion: v1, fieldPath: metadata.namespace}}]
{{- end }}

{{- /* What the world may ask. /metrics and the probes take no key, and stay inside the cluster; /ping is part of SageMaker's API. */}}
{{- define "serve-app.publicPaths" -}}
[/v1, /generate, /tokenize, /detokenize, /pooling, /classify, /score, /rerank, /v2/rerank, /version{{ if dig "ingress" "sagemaker_routes" false .Values.config }}, /invocations, /ping{{ end }}]
{{- end }}

{{- /* Bytes of the largest body that the ingress takes: with batches a whole upload, which is the file and 64 KiB of its form
(_FORM_BYTES of serve_app/batch/files_api.py). */}}
{{- define "serve-app.maxBodyBytes" -}}
{{- $body := dig "ingress" "max_body_bytes" 10485760 .Values.config | int64 -}}
{{- with dig "ingress" "batch" dict .Values.config -}}
{{- $body = max $body (add 65536 (dig "max_file_bytes" 209715200 . | int64)) -}}
{{- end -}}
{{ $body }}
{{- end }}
