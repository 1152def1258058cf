{{- /* The template of a pod of Ray. Args: root, component, pods (its settings), group (labels the spread counts within),
container (its name), resources, account, priority, affinity, ports, readiness, preStop, grace, rayDrain; if any:
initContainers (as text), labels, mounts, volumes, runtimeClassName, livenessFailures (5 s each). */}}
{{- define "serve-app.rayPod" -}}
{{- $env := include "serve-app.rayEnv" . -}}
{{- $mounts := concat (include "serve-app.scratchMounts" .pods | fromYamlArray) (.mounts | default list) -}}
{{- $volumes := concat (include "serve-app.scratchVolumes" .pods | fromYamlArray) (.volumes | default list) -}}
metadata:
  labels:
    {{- include "serve-app.podLabels" . | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
    {{- with .labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with include "serve-app.podAnnotations" .pods }}
  annotations:
    {{- trim . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "serve-app.account" . | quote }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  securityContext:
    {{- include "serve-app.podSecurityContext" .root | nindent 4 }}
  {{- include "serve-app.pullSecrets" .root | nindent 2 }}
  {{- include "serve-app.priorityClass" (dict "root" .root "name" .priority "override" .pods.priorityClassName) | nindent 2 }}
  terminationGracePeriodSeconds: {{ .grace }}
  {{- with include "serve-app.scheduling" . | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- if or .initContainers .pods.extra.initContainers }}
  initContainers:
    {{- with .initContainers }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- with .pods.extra.initContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
  containers:
    - name: {{ .container }}
      {{- include "serve-app.podImage" . | nindent 6 }}
      terminationMessagePolicy: FallbackToLogsOnError # KubeRay deletes a pod that has ended; its event has the message
      securityContext:
        {{- include "serve-app.securityContext" .root | nindent 8 }}
      env:
        {{- $env | nindent 8 }}
        {{- with .pods.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with .pods.extra.envFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      ports:
        {{- toYaml .ports | nindent 8 }}
      readinessProbe:
        {{- toYaml .readiness | nindent 8 }}
      livenessProbe:
        httpGet: {path: /api/healthz, port: 52365}
        initialDelaySeconds: 30
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ .livenessFailures | default 120 }}
      {{- if gt (int .preStop) 0 }}{{- /* Kubernetes up to 1.32 refuses a sleep of 0 s */}}
      lifecycle:
        preStop:
          sleep: {seconds: {{ .preStop }}}
      {{- end }}
      resources:
        {{- toYaml .resources | nindent 8 }}
      volumeMounts:
        {{- toYaml $mounts | nindent 8 }}
        {{- with .pods.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    {{- with .pods.extra.containers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    {{- toYaml $volumes | nindent 4 }}
    {{- with .pods.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{- /* KubeRay overlooks a change of tolerations: with their hash in an annotation it makes a new Ray cluster. Args: the pods' settings. */}}
{{- define "serve-app.podAnnotations" -}}
{{ with .podAnnotations }}{{ toYaml . }}{{ end }}
{{- with .tolerations }}
serve-app/tolerations: {{ toJson . | sha256sum | trunc 16 | quote }}
{{- end }}
{{- end }}

{{- /* Ports of every Ray node, pinned so that policies can name them; 10002-10999 are the worker processes'. */}}
{{- define "serve-app.rayPorts" -}}
node-manager-port: "8076"
object-manager-port: "8077"
runtime-env-agent-port: "8078"
dashboard-agent-grpc-port: "8079"
dashboard-agent-listen-port: "52365"
metrics-export-port: "8080"
min-worker-port: "10002"
max-worker-port: "10999"
object-store-memory: {{ include "serve-app.objectStoreBytes" . | quote }}
{{- end }}

{{- /* 128Mi: serve-app hardly uses it; Ray's own default would be 30 % of the memory. */}}
{{- define "serve-app.objectStoreBytes" }}134217728{{ end }}
