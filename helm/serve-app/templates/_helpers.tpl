{{- /* Names, labels and images. Release names have at most 41 characters, so suffixes of up to 22 fit into 63. */}}

{{- define "serve-app.selectorLabels" -}}
app.kubernetes.io/name: serve-app
app.kubernetes.io/instance: {{ .Release.Name }}
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

{{- /* Args: image (repository, tag, digest), default (tag). */}}
{{- define "serve-app.imageRef" -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}:{{ .image.tag | default .default }}
{{- end -}}
{{- end }}

{{- /* The CPU image: of every pod but those of models that serve-app.modelPods gives the CUDA image. */}}
{{- define "serve-app.image" -}}
{{ include "serve-app.imageRef" (dict "image" .Values.image "default" .Chart.AppVersion) }}
{{- end }}

{{- /* The tag of the CUDA image of the same build, by the Makefile's convention. */}}
{{- define "serve-app.cudaTag" -}}
{{ .Values.image.tag | default .Chart.AppVersion }}-cuda
{{- end }}

{{- /* The image of pods by their settings; all but a model's have no `image` there. Args: root, pods. */}}
{{- define "serve-app.podImage" -}}
{{- if eq (.pods.image | default "cpu") "cuda" -}}
{{- $v := .root.Values -}}
{{- $image := set (deepCopy $v.cudaImage) "repository" ($v.cudaImage.repository | default $v.image.repository) -}}
{{ include "serve-app.imageRef" (dict "image" $image "default" (include "serve-app.cudaTag" .root)) }}
{{- else -}}
{{ include "serve-app.image" .root }}
{{- end -}}
{{- end }}

{{- /* For containers that hold no GPU. Bases of CUDA say `all`, which a node whose default runtime is NVIDIA's takes at its word. Where a
GPU is held, its device plugin sets the variable. */}}
{{- define "serve-app.noGpusEnv" -}}
- {name: NVIDIA_VISIBLE_DEVICES, value: void}
{{- end }}

{{- define "serve-app.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "serve-app.clusterTokenSecret" -}}
{{ .Values.clusterToken.existingSecret | default (printf "%s-cluster-token" .Release.Name) }}
{{- end }}

{{- define "serve-app.rayTokenSecret" -}}
{{ .Values.rayToken.existingSecret | default (printf "%s-ray-token" .Release.Name) }}
{{- end }}

{{- define "serve-app.apiKeysSecret" -}}
{{ .Values.apiKeys.existingSecret | default (printf "%s-api-keys" .Release.Name) }}
{{- end }}

{{- define "serve-app.weightsClaim" -}}
{{ .Values.weights.existingClaim | default (printf "%s-weights" .Release.Name) }}
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
{{ .root.Release.Name }}-{{ .name }}.{{ .root.Release.Namespace }}
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

{{- /* What the world may ask. /metrics and the probes take no key, and stay inside the cluster. */}}
{{- define "serve-app.publicPaths" -}}
[/v1, /generate, /tokenize, /detokenize, /version]
{{- end }}
