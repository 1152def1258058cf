{{- /* Checks across values. The rules are tables in files/lints/*.yaml: of each, its name (`rule`), the condition of a broken one (`when`)
and the sentence (`says`). The templates serve-app.lintX find what a table is to judge. All problems are reported together, but for those
whose rules ignoredRules names; tests/chart/test_lint.py and test_lint_timeouts.py trigger each. */}}
{{- define "serve-app.lint" -}}
{{- $tables := dict -}}
{{- range $file, $_ := .Files.Glob "files/lints/*.yaml" }}{{ $tables = merge $tables ($.Files.Get $file | fromYaml) }}{{ end -}}
{{- $in := dict "root" . "tables" $tables "shared" (.Files.Get "files/rules.yaml" | fromYaml) -}}
{{- $problems := printf "%s\n%s" (include "serve-app.lintForeign" $in) (include "serve-app.lintForms" $in) | trim
    | default (include "serve-app.lintConfig" $in | trim) -}}
{{- if not $problems -}}{{- /* the other checks read names and configuration that these refuse */ -}}
{{- $_ := set $in "models" (include "serve-app.models" . | fromYamlArray) -}}
{{- $_ := set $in "groups" list -}}
{{- range include "serve-app.groups" . | fromYamlArray -}}
{{- $pods := include "serve-app.modelPods" (dict "root" $ "model" .) | fromYaml -}}
{{- $host := .podsOf | default .name -}}
{{- $at := ternary (printf "config.models.%s" $host) .at (ne $host .name) -}}
{{- $path := ternary (printf "%s.pods" $at) "modelPods" (hasKey (dig $host dict ($.Values.config.models | default dict)) "pods") -}}
{{- $_ := set $in "groups" (append $in.groups (dict "model" . "pods" $pods "path" $path)) -}}
{{- end -}}
{{- range list "Ports" "Accounts" "Timeouts" "Alb" "Edge" "Scaling" "Gpus" "Sleep" "Pods" "Additions" "Folders"
    "Images" "Secrets" "Weights" "Effect" "Tenants" "Redis" -}}
{{- $problems = printf "%s\n%s" $problems (include (printf "serve-app.lint%s" .) $in) -}}
{{- end -}}
{{- end -}}
{{- $found := list -}}
{{- range splitList "\n" $problems | uniq -}}
{{- if . -}}
{{- $problem := fromJsonArray . -}}
{{- if not (has (first $problem) $.Values.ignoredRules) -}}
{{- $found = append $found (printf "  %s: %s" (first $problem) (last $problem)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if $found -}}
{{- $way := "To break a rule on purpose, put its name into ignoredRules." -}}
{{- fail (printf "the values break %d of the chart's rules:\n%s\n%s" (len $found) (join "\n" $found) $way) -}}
{{- end -}}
{{- end }}

{{- /* Judge by one table: a JSON list of name and sentence per broken rule, each in a line. Args: in (root, tables, shared, models,
groups), table, and what its rules read. */}}
{{- define "serve-app.judge" -}}
{{- $rules := "" -}}
{{- range index .in.tables .table -}}
{{- $rules = printf "%s{{ if %s }}{{ list %q (tpl %q .) | toJson | nindent 0 }}{{ end }}" $rules .when .rule .says -}}
{{- end -}}
{{- tpl $rules (set . "Values" .in.root.Values) -}}
{{- end }}

{{- /* Names of other systems, arguments of vLLM and names of earlier versions, which the schema lets through: a closed object could not say
which key is meant. */}}
{{- define "serve-app.lintForeign" -}}
{{- $in := . -}}
{{- $config := .root.Values.config -}}
{{- $arguments := dict -}}
{{- range $row := .shared.arguments }}{{ range $row.names }}{{ $_ := set $arguments . $row.meant }}{{ end }}{{ end -}}
{{- $both := merge (deepCopy .shared.foreign) $arguments -}}
{{- range $section := .shared.sections -}}
{{- $table := ternary $both $in.shared.foreign $section.takesArguments -}}
{{- range $path, $keys := include "serve-app.keysAt" (dict "config" $config "place" $section.place) | fromJson -}}
{{- range $key := $keys -}}
{{- with and (not (has $key $section.own)) (get $table (include "serve-app.plainName" $key)) -}}
{{- include "serve-app.judge" (dict "in" $in "table" "foreign" "path" (printf "%s.%s" $path $key) "what" "key" "meant" .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $old := dict "" .root.Values -}}
{{- $counts := dict "config.ingress.replicas" (dig "ingress" "replicas" dict $config) -}}
{{- range $name, $model := $config.models -}}
{{- $_ := set $counts (printf "config.models.%s.replicas" $name) (get $model "replicas") -}}
{{- range $adapter, $value := $model.adapters -}}
{{- if kindIs "string" $value -}}
{{- include "serve-app.judge" (dict "in" $in "table" "bare_adapters" "path" (printf "config.models.%s.adapters.%s" $name $adapter)
    "value" $value) -}}
{{- end -}}
{{- end -}}
{{- range $key, $_ := $model.engine_args -}}
{{- $plain := include "serve-app.plainName" $key -}}
{{- with and (not (hasKey $arguments $plain)) (get $in.shared.foreign $plain) -}}
{{- $path := printf "config.models.%s.engine_args.%s" $name $key -}}
{{- include "serve-app.judge" (dict "in" $in "table" "foreign" "path" $path "what" "argument" "meant" .) -}}
{{- end -}}
{{- end -}}
{{- $_ := set $old (printf "config.models.%s.pods" $name) (dict "modelPods" ($model.pods | default dict)) -}}
{{- end -}}
{{- range $path, $value := $counts -}}
{{- if regexMatch "^(int|float)" (kindOf $value) -}}
{{- include "serve-app.judge" (dict "in" $in "table" "counts" "path" $path "value" $value
    "most" ($in.shared.maxWrittenReplicas | int)) -}}
{{- end -}}
{{- end -}}
{{- range $key, $meant := .shared.foreignValues -}}
{{- if eq (include "serve-app.hasAt" (dict "values" $in.root.Values "path" $key)) "true" -}}
{{- include "serve-app.judge" (dict "in" $in "table" "foreign" "path" $key "what" "key" "meant" $meant) -}}
{{- end -}}
{{- end -}}
{{- range $at, $values := $old -}}
{{- range $path, $now := $in.shared.moved -}}
{{- if eq (include "serve-app.hasAt" (dict "values" $values "path" $path)) "true" -}}
{{- $names := dict "path" $path "now" $now -}}
{{- if $at -}}
{{- $own := printf "%s." $at -}}
{{- $names = dict "path" (replace "modelPods." $own $path) "now" (replace "modelPods." $own $now) -}}
{{- end -}}
{{- include "serve-app.judge" (merge (dict "in" $in "table" "moved") $names) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- /* Whether there is something, if only null, at a path with dots, as "true" or "false". Args: values, path. */}}
{{- define "serve-app.hasAt" -}}
{{- $parent := .values -}}{{- $keys := splitList "." .path -}}
{{- range initial $keys }}{{ $parent = get ($parent | default dict) . }}{{ end -}}
{{ hasKey ($parent | default dict) (last $keys) }}
{{- end }}

{{- define "serve-app.lintConfig" -}}
{{- $in := . -}}
{{- $root := .root -}}
{{- $given := ne $root.Values.fullnameOverride "" -}}
{{- include "serve-app.judge" (dict "in" . "table" "name" "name" (include "serve-app.fullname" $root)
    "called" (ternary "fullnameOverride is" "the release is called" $given)
    "way" (ternary "choose another" "choose another name, or set fullnameOverride" $given)) -}}
{{- $made := include "serve-app.config" $root | fromYaml -}}
{{- range $path := list "name" "ingress.host" "ingress.resources" "ingress.api_keys_file" "ingress.tenants_file"
    "protocol.host" "protocol.cluster_token_file" -}}
{{- $keys := splitList "." $path -}}
{{- $parent := $root.Values.config -}}
{{- $wanted := $made -}}
{{- range initial $keys -}}
{{- $parent = index $parent . | default dict -}}
{{- $wanted = index $wanted . -}}
{{- end -}}
{{- if hasKey $parent (last $keys) -}}
{{- include "serve-app.judge" (dict "in" $in "table" "ours" "path" $path
    "given" (index $parent (last $keys) | toJson) "wanted" (index $wanted (last $keys) | toJson)) -}}
{{- end -}}
{{- end -}}
{{- include "serve-app.judge" (dict "in" . "table" "served" "models" (include "serve-app.models" $root | fromYamlArray)) -}}
{{- range include "serve-app.groups" $root | fromYamlArray -}}
{{- include "serve-app.judge" (dict "in" $in "table" "bound" "model" . "nodes" (include "serve-app.nodesOf" . | int)
    "gpus" (dig "gpus_per_replica" 0 . | int)
    "stages" (get (.engine_args | default dict) "pipeline_parallel_size" | default 1 | int)) -}}
{{- end -}}
{{- end }}
