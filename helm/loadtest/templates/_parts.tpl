{{- /* Pieces of the pods. All take the root. */}}

{{- define "loadtest.targetEnv" -}}
- name: TARGET_URL
  {{- if .Values.target.url }}
  value: {{ .Values.target.url | quote }}
  {{- else }}
  valueFrom: {secretKeyRef: {name: {{ .Values.target.existingSecret | quote }}, key: {{ .Values.target.urlSecretKey | quote }}}}
  {{- end }}
{{- end }}

{{- define "loadtest.podNameEnv" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
{{- end }}

{{- /* Whether an API key is sent: true or nothing. */}}
{{- define "loadtest.hasKey" -}}
{{- if and .Values.target.existingSecret .Values.target.apiKeySecretKey }}true{{ end -}}
{{- end }}

{{- define "loadtest.keyArgs" -}}
{{- if include "loadtest.hasKey" . }}["--api-key-file", "/etc/loadtest/api-key/key"]{{ else }}[]{{ end -}}
{{- end }}

{{- define "loadtest.keyMounts" -}}
{{- if include "loadtest.hasKey" . -}}
- {name: api-key, mountPath: /etc/loadtest/api-key, readOnly: true}
{{- end -}}
{{- end }}

{{- define "loadtest.keyVolumes" -}}
{{- if include "loadtest.hasKey" . -}}
- name: api-key
  secret:
    secretName: {{ .Values.target.existingSecret | quote }}
    defaultMode: 0440
    items: [{key: {{ .Values.target.apiKeySecretKey | quote }}, path: key}]
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "loadtest.masterMounts" -}}
- {name: scenario, mountPath: /etc/loadtest/scenario, readOnly: true}
- {name: results, mountPath: /results}
{{- if include "loadtest.listsPods" . }}
- {name: kube-api-access, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}
{{- end }}
{{ include "loadtest.keyMounts" . }}
{{- end }}

{{- define "loadtest.resultsVolume" -}}
- name: results
  {{- if .Values.results.persistence.enabled }}
  persistentVolumeClaim: {claimName: {{ include "loadtest.claim" . | quote }}}
  {{- else }}
  emptyDir: {sizeLimit: {{ .Values.results.emptyDirSize }}}
  {{- end }}
{{- end }}

{{- define "loadtest.masterVolumes" -}}
- name: scenario
  configMap: {name: {{ printf "%s-scenario" .Release.Name | quote }}, defaultMode: 0444}
{{ include "loadtest.resultsVolume" . }}
{{- if include "loadtest.listsPods" . }}
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
{{ include "loadtest.keyVolumes" . }}
{{- end }}

{{- /* With a volume for one node the master goes where the report's pod has it. */}}
{{- define "loadtest.masterAffinity" -}}
{{- $affinity := deepCopy .Values.master.affinity -}}
{{- if and (include "loadtest.reportPod" .) (eq .Values.results.persistence.accessMode "ReadWriteOnce") -}}
{{- $term := dict "topologyKey" "kubernetes.io/hostname" "labelSelector" (dict "matchLabels" (include "loadtest.podLabels" (dict "root" . "component" "report") | fromYaml)) -}}
{{- $own := dict "podAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (list $term)) -}}
{{- $affinity = merge $affinity $own -}}
{{- end -}}
{{ toYaml $affinity }}
{{- end }}

{{- /* The container that serves the results' folder: Python's own server, which knows GET and HEAD alone. */}}
{{- define "loadtest.reportContainer" -}}
{{ include "loadtest.container" (dict "root" . "name" "report" "command" (list "python" "-m" "http.server") "args" (list "8090" "--bind" "0.0.0.0" "--directory" "/results") "mounts" "- {name: results, mountPath: /results, readOnly: true}") }}
ports: [{name: report, containerPort: 8090}]
readinessProbe: {httpGet: {path: /, port: report}, periodSeconds: 10, timeoutSeconds: 5}
livenessProbe: {httpGet: {path: /, port: report}, periodSeconds: 30, timeoutSeconds: 10, failureThreshold: 5}
resources:
  {{- toYaml .Values.report.resources | nindent 2 }}
{{- end }}

{{- /* A worker: Locust ends it when the master is done, or was silent for a minute. */}}
{{- define "loadtest.workerContainer" -}}
{{- $args := concat (include "loadtest.keyArgs" . | fromJsonArray) (list "--worker" "--master-host" (include "loadtest.bus" .)) -}}
{{ include "loadtest.container" (dict "root" . "extra" true "name" "worker" "command" (list "serve-app-loadtest" "locust") "args" $args "mounts" (include "loadtest.keyMounts" .)) }}
resources:
  {{- toYaml .Values.workers.resources | nindent 2 }}
{{- end }}
