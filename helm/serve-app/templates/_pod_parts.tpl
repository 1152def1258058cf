{{- /* What the chart itself gives the containers of Ray: environment, volumes, mounts. */}}

{{- /* Args: as of serve-app.rayPod. */}}
{{- define "serve-app.rayEnv" -}}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
- {name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, value: {{ .rayDrain | quote }}}
- {name: RAY_gcs_rpc_server_reconnect_timeout_s, value: {{ (include "serve-app.timeouts" .root | fromYaml).gcsReconnect | quote }}}
- {name: RAY_LOG_TO_STDERR, value: "1"} # for kubectl logs; Serve keeps its files besides
{{ include "serve-app.logRotation" . }}
{{- if eq .component "head" }}
{{- with include "serve-app.redisAuthorities" .root }}
{{ . }}
{{- end }}
{{- end }}
{{- if not .pods.gpus }}
{{ include "serve-app.noGpusEnv" . }}
{{- end }}
{{- if include "serve-app.compileCacheClaim" .pods }}
{{ include "serve-app.compileCacheEnv" . }}
{{- end }}
{{- end }}

{{- /* What a container of Ray may write to. /dev/shm counts as memory. Args: the pods' settings: a model's have all three sizes. */}}
{{- define "serve-app.scratchVolumes" -}}
- name: tmp
  emptyDir: {sizeLimit: {{ .tmpSize }}}
- name: home
  emptyDir: {sizeLimit: {{ .homeSize | default "1Gi" }}}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .shmSize | default "256Mi" }}}
{{- with include "serve-app.compileCacheClaim" . }}
- name: compile-cache
  persistentVolumeClaim: {claimName: {{ . | quote }}}
{{- end }}
{{- end }}

{{- /* Args: the pods' settings. */}}
{{- define "serve-app.scratchMounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: home, mountPath: /home/serve-app}
- {name: shm, mountPath: /dev/shm}
{{- if include "serve-app.compileCacheClaim" . }}
- {name: compile-cache, mountPath: /var/cache/serve-app}
{{- end }}
{{- end }}

{{- define "serve-app.clusterTokenMounts" -}}
- {name: cluster-token, mountPath: /etc/serve-app/cluster-token, readOnly: true}
{{- if .Values.weights.enabled }}
- {name: weights, mountPath: /models, readOnly: true}
{{- end }}
{{- end }}

{{- define "serve-app.clusterTokenVolumes" -}}
- name: cluster-token
  secret: {secretName: {{ include "serve-app.clusterTokenSecret" . | quote }}, defaultMode: 0440}
{{- if .Values.weights.enabled }}
- name: weights
  persistentVolumeClaim: {claimName: {{ include "serve-app.weightsClaim" . | quote }}}
{{- end }}
{{- end }}

{{- /* The claim that holds compile caches, or nothing. Args: the settings of any pods of Ray. */}}
{{- define "serve-app.compileCacheClaim" -}}
{{- with .compileCache }}{{ .existingClaim }}{{ end -}}
{{- end }}

{{- /* Where vLLM and the compilers below it keep what they compiled: all on the claim of modelPods.compileCache. */}}
{{- define "serve-app.compileCacheEnv" -}}
- {name: VLLM_CACHE_ROOT, value: /var/cache/serve-app/vllm}
- {name: TRITON_CACHE_DIR, value: /var/cache/serve-app/triton}
- {name: FLASHINFER_WORKSPACE_BASE, value: /var/cache/serve-app}
- {name: CUDA_CACHE_PATH, value: /var/cache/serve-app/nv}
{{- end }}
