{{- /* global.imageRegistry takes the place of the repository's first part where that is a registry. Args: root, image (repository, tag,
digest), default (tag). */}}
{{- define "serve-app.imageRef" -}}
{{- $repository := .image.repository -}}
{{- with .root.Values.global.imageRegistry -}}
{{- $repository = printf "%s/%s" (trimSuffix "/" .) (regexReplaceAll "^([^/]*[.:][^/]*|localhost)/" $repository "") -}}
{{- end -}}
{{- if .image.digest -}}
{{ $repository }}@{{ .image.digest }}
{{- else -}}
{{ $repository }}:{{ .image.tag | default .default }}
{{- end -}}
{{- end }}

{{- /* The CPU image: of every pod but those of models that serve-app.modelPods gives the CUDA image. */}}
{{- define "serve-app.image" -}}
{{ include "serve-app.imageRef" (dict "root" . "image" .Values.image "default" .Chart.AppVersion) }}
{{- end }}

{{- /* The tag of the CUDA image of the same build, by the Makefile's convention. */}}
{{- define "serve-app.cudaTag" -}}
{{ .Values.image.tag | default .Chart.AppVersion }}-cuda
{{- end }}

{{- /* Image and imagePullPolicy of pods by their settings; all but a model's have no `image` there. Args: root, pods. */}}
{{- define "serve-app.podImage" -}}
{{- $v := .root.Values -}}
{{- if eq (.pods.image | default "cpu") "cuda" -}}
{{- $image := set (deepCopy $v.cudaImage) "repository" ($v.cudaImage.repository | default $v.image.repository) -}}
image: {{ include "serve-app.imageRef" (dict "root" .root "image" $image "default" (include "serve-app.cudaTag" .root)) }}
{{- else -}}
image: {{ include "serve-app.image" .root }}
{{- end }}
imagePullPolicy: {{ $v.image.pullPolicy }}
{{- end }}

{{- /* The Secrets by which every pod pulls. */}}
{{- define "serve-app.pullSecrets" -}}
{{- $names := list -}}
{{- range .Values.global.imagePullSecrets -}}{{- /* a parent chart may write `{name: ...}`, as Kubernetes does */ -}}
{{- $names = append $names (kindIs "string" . | ternary . (get (kindIs "map" . | ternary . dict) "name")) -}}
{{- end -}}
{{- with concat $names .Values.image.pullSecrets | uniq }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- end }}
