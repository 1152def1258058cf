{{- /* The pod of a download. S3: the AWS command line fetches, then the checksums are compared. Args: root, download. */}}
{{- define "serve-app.weightsPod" -}}
{{- $w := .root.Values.weights -}}
{{- $target := printf "/models/%s" .download.path -}}
{{- $s3 := hasPrefix "s3://" .download.source -}}
metadata:
  labels:
    {{- include "serve-app.podLabels" (dict "root" .root "pods" .root.Values.jobs) | nindent 4 }}
    app.kubernetes.io/component: weights
spec:
  serviceAccountName: {{ include "serve-app.account" (dict "root" .root "account" "weights") | quote }}
  automountServiceAccountToken: false # Pod Identity and IRSA project a token of their own
  enableServiceLinks: false
  restartPolicy: Never
  securityContext:
    {{- include "serve-app.podSecurityContext" .root | nindent 4 }}
  {{- include "serve-app.pullSecrets" .root | nindent 2 }}
  {{- include "serve-app.placement" .root.Values.jobs | nindent 2 }}
  {{- if $s3 }}
  initContainers:
    - name: fetch
      image: {{ include "serve-app.imageRef" (dict "root" .root "image" $w.s3Image) }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      terminationMessagePolicy: FallbackToLogsOnError
      securityContext:
        {{- include "serve-app.securityContext" .root | nindent 8 }}
      command: [aws, s3, sync, --no-progress, {{ .download.source | quote }}, {{ $target }}]
      env:
        - {name: HOME, value: /home/serve-app}
        {{- with $w.s3Region }}
        - {name: AWS_REGION, value: {{ . | quote }}}
        {{- end }}
        {{- with $w.s3Endpoint }}
        - {name: AWS_ENDPOINT_URL_S3, value: {{ . | quote }}}
        {{- end }}
        {{- with $w.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      resources:
        {{- toYaml $w.resources | nindent 8 }}
      volumeMounts:
        {{- include "serve-app.weightsMounts" . | nindent 8 }}
  {{- end }}
  containers:
    - name: weights
      image: {{ include "serve-app.image" .root }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      terminationMessagePolicy: FallbackToLogsOnError
      securityContext:
        {{- include "serve-app.securityContext" .root | nindent 8 }}
      {{- if $s3 }}
      command: [serve-app, model, verify]
      args: [{{ $target }}, {{ include "serve-app.weightsMark" .download | quote }}, --sha256={{ .download.sha256 }}]
      {{- else }}
      command: [serve-app, model, download]
      args: [{{ $target }}, {{ include "serve-app.weightsMark" .download | quote }}]
      {{- end }}
      env:
        {{- include "serve-app.noGpusEnv" .root | nindent 8 }}
        {{- if not $s3 }}
        - {name: HF_HUB_OFFLINE, value: "0"}
        {{- with $w.huggingFaceEndpoint }}
        - {name: HF_ENDPOINT, value: {{ . | quote }}}
        {{- end }}
        {{- if $w.huggingFaceTokenSecret }}
        - {name: HF_TOKEN_PATH, value: /etc/serve-app/hugging-face/token}
        {{- end }}
        {{- end }}
        {{- with $w.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      resources:
        {{- toYaml $w.resources | nindent 8 }}
      volumeMounts:
        {{- include "serve-app.weightsMounts" . | nindent 8 }}
        {{- if and $w.huggingFaceTokenSecret (not $s3) }}
        - {name: hugging-face, mountPath: /etc/serve-app/hugging-face, readOnly: true}
        {{- end }}
  volumes:
    - name: tmp
      emptyDir: {sizeLimit: 1Gi}
    - name: home
      emptyDir: {sizeLimit: 1Gi}
    - name: weights
      persistentVolumeClaim: {claimName: {{ include "serve-app.weightsClaim" .root | quote }}}
    {{- if and $w.huggingFaceTokenSecret (not $s3) }}
    - name: hugging-face
      secret:
        secretName: {{ $w.huggingFaceTokenSecret | quote }}
        defaultMode: 0440
        items: [{key: token, path: token}]
    {{- end }}
    {{- with $w.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{- define "serve-app.weightsMounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: home, mountPath: /home/serve-app}
- {name: weights, mountPath: /models}
{{- with .root.Values.weights.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}
