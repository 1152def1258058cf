{{- /* What the tables of files/lints/tenants.yaml judge: tenants.inline, and what tokens of an identity provider need. The job
RELEASE-check finds all other mistakes. Args: in, as of serve-app.judge. */}}
{{- define "serve-app.lintTenants" -}}
{{- $in := . -}}
{{- $served := list -}}
{{- range .models }}{{ if not .canary }}{{ $served = append $served .name }}{{ end }}{{ end -}}
{{- $ids := dict -}}{{- $digests := dict -}}
{{- range $name, $tenant := .root.Values.tenants.inline -}}
{{- $at := printf "tenants.inline.%s" $name -}}
{{- include "serve-app.judge" (dict "in" $in "table" "tenants" "name" $name "known" $in.shared.tenantNames) -}}
{{- range $i, $model := $tenant.models -}}
{{- include "serve-app.judge" (dict "in" $in "table" "tenant_models" "at" $at "i" $i "model" $model "served" $served) -}}
{{- end -}}
{{- range $i, $key := $tenant.keys -}}
{{- $at := printf "%s.keys[%d]" $at $i -}}
{{- $digest := lower $key.sha256 -}}
{{- include "serve-app.judge" (dict "in" $in "table" "tenant_keys" "at" $at "same_id" (get $ids $key.id)
    "same_digest" (get $digests $digest)) -}}
{{- $_ := set $ids $key.id $at -}}{{- $_ := set $digests $digest $at -}}
{{- range $field := list "expires" "revoked" -}}
{{- include "serve-app.judge" (dict "in" $in "table" "tenant_days" "at" $at "field" $field "day" (get $key $field)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with dig "ingress" "oidc" dict .root.Values.config -}}
{{- include "serve-app.judge" (dict "in" $in "table" "oidc" "issuer" .issuer) -}}
{{- end -}}
{{- end }}
