{{- /* What a finished download is marked with. Args: one of weights.downloads. */}}
{{- define "serve-app.weightsMark" -}}
{{ .source }}@{{ .revision | default .sha256 }}
{{- end }}

{{- /* The init container that waits for downloads, as a list of one or none. Args: root, downloads. */}}
{{- define "serve-app.weightsWait" -}}
{{- if .downloads }}
- name: wait-for-weights
  image: {{ include "serve-app.image" .root }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  terminationMessagePolicy: FallbackToLogsOnError
  securityContext:
    {{- include "serve-app.securityContext" .root | nindent 4 }}
  command: [serve-app, model, wait]
  args:
    - --timeout-s={{ .root.Values.weights.activeDeadlineSeconds }}
    {{- range .downloads }}
    - /models/{{ .path }}
    - {{ include "serve-app.weightsMark" . | quote }}
    {{- end }}
  env:
    {{- include "serve-app.noGpusEnv" .root | nindent 4 }}
  resources:
    requests: {cpu: 50m, memory: 128Mi}
    limits: {cpu: "1", memory: 512Mi}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    - {name: home, mountPath: /home/serve-app}
    - {name: weights, mountPath: /models, readOnly: true}
{{- end }}
{{- end }}
