{{- /* What all pods share, from metadata to volumes. Args: root, component, pods (values of master or workers, or nothing), restart,
       grace, share, affinity, initContainers, containers, volumes (the last three as YAML lists). */}}
{{- define "loadtest.pod" -}}
{{- $pods := .pods | default dict -}}
metadata:
  labels:
    {{- include "loadtest.podLabels" . | nindent 4 }}
    {{- with $pods.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    # A moved pod is a lost run.
    cluster-autoscaler.kubernetes.io/safe-to-evict: "false"
    karpenter.sh/do-not-disrupt: "true"
    {{- with .checksum }}
    loadtest/scenario: {{ . | quote }}
    {{- end }}
    {{- with $pods.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ .root.Release.Name | quote }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  restartPolicy: {{ .restart }}
  {{- if .share }}
  shareProcessNamespace: true # Python's HTTP server ends at SIGTERM unless it is process 1
  {{- end }}
  terminationGracePeriodSeconds: {{ .grace }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    fsGroup: 10001
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile: {type: RuntimeDefault}
  {{- with .root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . | quote }}
    {{- end }}
  {{- end }}
  {{- with $pods.priorityClassName }}
  priorityClassName: {{ . | quote }}
  {{- end }}
  {{- with $pods.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $pods.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $pods.topologySpread }}
  topologySpreadConstraints:
    - topologyKey: kubernetes.io/hostname
      maxSkew: 1
      whenUnsatisfiable: {{ . }}
      labelSelector:
        matchLabels:
          {{- include "loadtest.podLabels" $ | nindent 10 }}
  {{- end }}
  {{- with .initContainers }}
  initContainers:
    {{- . | nindent 4 }}
  {{- end }}
  containers:
    {{- .containers | nindent 4 }}
  volumes:
    - name: tmp
      emptyDir: {sizeLimit: 1Gi}
    {{- with .volumes }}
    {{- . | nindent 4 }}
    {{- end }}
{{- end }}

{{- /* A container of our image, without resources. Args: root, name, command, args (lists), env, mounts (YAML lists). */}}
{{- define "loadtest.container" -}}
name: {{ .name }}
{{ include "loadtest.image" .root }}
terminationMessagePolicy: FallbackToLogsOnError
securityContext:
  {{- include "loadtest.securityContext" .root | nindent 2 }}
command: {{ toJson .command }}
args:
  {{- range .args }}
  - {{ . | quote }}
  {{- end }}
workingDir: /
env:
  - {name: HOME, value: /tmp} # caches of matplotlib and others
  {{- with .env }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- if .extra }}
  {{- with .root.Values.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- end }}
volumeMounts:
  - {name: tmp, mountPath: /tmp}
  {{- with .mounts }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- if .extra }}
  {{- with .root.Values.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- end }}
{{- end }}
