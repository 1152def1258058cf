{{- /* Mistakes in tenants.inline that show without the application, and what tokens of an identity provider need. The job RELEASE-check
finds all other mistakes. No sentence quotes a digest. */}}
{{- define "serve-app.lintTenants" -}}
{{- $names := (.Files.Get "files/rules.yaml" | fromYaml).tenantNames -}}
{{- $served := list -}}
{{- range include "serve-app.models" . | fromYamlArray -}}
{{- if not .canary }}{{ $served = append $served .name }}{{ end -}}
{{- end -}}
{{- $ids := dict -}}{{- $digests := dict -}}
{{- range $name, $tenant := .Values.tenants.inline -}}
{{- $at := printf "tenants.inline.%s" $name -}}
{{- if or (not (regexMatch $names.pattern $name)) (has $name $names.reserved) -}}
{{- list "tenant-name" (printf "tenants.inline has %q, which is no name of a tenant: use up to 63 of a-z, 0-9, '.', '_' and '-', as in search-team, and not %s" (trunc 63 $name) (join " or " $names.reserved)) | toJson | nindent 0 -}}
{{- end -}}
{{- range $i, $model := $tenant.models -}}
{{- if not (has $model $served) -}}
{{- list "tenant-model-not-served" (printf "%s.models[%d] is %s, but config.models serves %s: name one of these, which includes its aliases, adapters and canary" $at $i $model (join ", " $served)) | toJson | nindent 0 -}}
{{- end -}}
{{- end -}}
{{- range $i, $key := $tenant.keys -}}
{{- $at := printf "%s.keys[%d]" $at $i -}}
{{- with get $ids $key.id -}}
{{- list "tenant-key-twice" (printf "%s.id is that of %s, too: give each key an id of its own" $at .) | toJson | nindent 0 -}}
{{- end -}}
{{- with get $digests (lower $key.sha256) -}}
{{- list "tenant-key-twice" (printf "%s.sha256 is that of %s, too: one key would be two clients; make another key" $at .) | toJson | nindent 0 -}}
{{- end -}}
{{- $_ := set $ids $key.id $at -}}{{- $_ := set $digests (lower $key.sha256) $at -}}
{{- range $field := list "expires" "revoked" -}}
{{- $day := get $key $field -}}
{{- /* at noon: where clocks change at midnight, a day may begin at 1:00 */ -}}
{{- if and $day (ne $day (printf "%sT12:00" $day | toDate "2006-01-02T15:04" | date "2006-01-02")) -}}
{{- list "tenant-day" (printf "%s.%s is %s, which is no date: write year, month and day, as 2027-01-31" $at $field (trunc 20 $day)) | toJson | nindent 0 -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with dig "ingress" "oidc" dict .Values.config -}}
{{- if not (or $.Values.tenants.existingSecret $.Values.tenants.inline) -}}
{{- list "oidc-without-tenants" (printf "config.ingress.oidc.issuer is %s, but tenants.existingSecret and tenants.inline are empty: a token has to name a tenant; set one of them, in which a tenant needs no keys" .issuer) | toJson | nindent 0 -}}
{{- end -}}
{{- if and $.Values.networkPolicies.enabled (not $.Values.networkPolicies.extraEgress) -}}
{{- list "issuer-out-of-reach" (printf "config.ingress.oidc.issuer is %s, but networkPolicies.enabled is true and networkPolicies.extraEgress is empty: no ingress could read the issuer's keys, and every token would get 503; allow the address and port of the issuer, or of the proxy to it, for example [{ports: [{port: 443}]}]" .issuer) | toJson | nindent 0 -}}
{{- end -}}
{{- end -}}
{{- end }}
