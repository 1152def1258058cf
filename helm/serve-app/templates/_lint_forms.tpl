{{- /* What the table `forms` of files/lints/content.yaml judges: texts and amounts, by the forms that rules.yaml has for the names of their
keys. The keys of `config` are others: the schema judges them, and `serve-app check`. Args: in (of serve-app.judge), path, values. */}}
{{- define "serve-app.lintFormsOf" -}}
{{- $in := .in -}}{{- $path := .path -}}
{{- range $key, $value := .values -}}
{{- $at := printf "%s.%s" $path $key | trimPrefix "." -}}
{{- $form := get $in.shared.forms $key -}}
{{- if and $form (kindIs "slice" $value) -}}
{{- range $i, $each := $value -}}
{{- include "serve-app.judge" (dict "in" $in "table" "forms" "path" (printf "%s[%d]" $at $i) "value" $each "form" $form) -}}
{{- end -}}
{{- else if and (kindIs "map" $value) (not $form) (not (has $key $in.shared.freeMaps)) -}}
{{- include "serve-app.lintFormsOf" (dict "in" $in "path" $at "values" $value) -}}
{{- else if $form -}}
{{- include "serve-app.judge" (dict "in" $in "table" "forms" "path" $at "form" $form
    "value" (kindIs "map" $value | ternary $value ($value | default ""))) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "serve-app.lintForms" -}}
{{- $in := . -}}{{- $v := .root.Values -}}
{{- $own := omit $v "config" "extraObjects" "tenants" -}}
{{- $_ := set $own "global" (pick $v.global "imageRegistry") -}}
{{- include "serve-app.lintFormsOf" (dict "in" . "path" "" "values" $own) -}}
{{- range $name, $model := $v.config.models -}}
{{- with $model.pods -}}
{{- include "serve-app.lintFormsOf" (dict "in" $in "path" (printf "config.models.%s.pods" $name) "values" .) -}}
{{- end -}}
{{- end -}}
{{- range $account, $given := $v.serviceAccounts -}}
{{- include "serve-app.judge" (dict "in" $in "table" "own_accounts" "account" $account "given" $given) -}}
{{- end -}}
{{- range $i, $download := $v.weights.downloads -}}
{{- include "serve-app.judge" (dict "in" $in "table" "download_forms" "at" (printf "weights.downloads[%d]" $i) "download" $download
    "is_hub" (hasPrefix "hf:" $download.source)) -}}
{{- end -}}
{{- $zeros := dict "config.autoscaling.max_gpus" (dig "autoscaling" "max_gpus" 1 $v.config) -}}
{{- range $name, $model := $v.config.models -}}
{{- $replicas := kindIs "map" $model.replicas | ternary $model.replicas dict -}}
{{- include "serve-app.judge" (dict "in" $in "table" "from_zero" "at" (printf "config.models.%s" $name) "min" (get $replicas "min")
    "required" (get $model "required")) -}}
{{- $_ := set $zeros (printf "config.models.%s.replicas.max" $name) (get $replicas "max") -}}
{{- range $i, $window := $replicas.schedule -}}
{{- $_ := set $zeros (printf "config.models.%s.replicas.schedule[%d].max" $name $i) (get $window "max") -}}
{{- end -}}
{{- end -}}
{{- range $path, $value := $zeros -}}
{{- include "serve-app.judge" (dict "in" $in "table" "zeros" "path" $path "value" $value
    "hint" (get $in.shared.zeros (splitList "." $path | last))) -}}
{{- end -}}
{{- end }}
