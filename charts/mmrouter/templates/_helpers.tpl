{{/* Names are not derived from the release: the Lease, the rights on it and the policies of every model name them. */}}
{{- define "mmrouter.name" -}}mmrouter-operator{{- end }}

{{- define "mmrouter.selector" -}}
app.kubernetes.io/name: {{ include "mmrouter.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "mmrouter.gateway.selector" -}}
app.kubernetes.io/name: mmrouter-gateway
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "mmrouter.labels" -}}
{{ include "mmrouter.selector" . }}
{{ include "mmrouter.releaseLabels" . }}
{{- end }}

{{- define "mmrouter.gateway.labels" -}}
{{ include "mmrouter.gateway.selector" . }}
{{ include "mmrouter.releaseLabels" . }}
{{- end }}

{{- define "mmrouter.releaseLabels" -}}
app.kubernetes.io/part-of: mmrouter
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "mmrouter.image" -}}
{{- with .Values.image -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end }}
{{- end }}

{{/* Ranges of the API server as a JSON list: the site's setting, else the cluster's if lookupApiServer is set. */}}
{{- define "mmrouter.apiServerCidrs" -}}
{{- $cidrs := .Values.operatorConfig.apiServerCidrs | default list }}
{{- if and (not $cidrs) .Values.networkPolicy.lookupApiServer }}
{{- /* lookup returns nothing without a cluster, as in `helm template`. */}}
{{- range (lookup "discovery.k8s.io/v1" "EndpointSlice" "default" "kubernetes").endpoints }}
{{- range .addresses }}{{ $cidrs = append $cidrs (printf "%s/%s" . (ternary "128" "32" (contains ":" .))) }}{{ end }}
{{- end }}
{{- $cidrs = $cidrs | uniq | sortAlpha }}
{{- end }}
{{- $cidrs | toJson }}
{{- end }}

{{/* The operator's file. Empty values are left out, so that its own defaults hold. */}}
{{- define "mmrouter.config" -}}
{{- $config := dict "image" (include "mmrouter.image" .) }}
{{- range $key, $value := .Values.operatorConfig }}
{{- if $value }}{{ $_ := set $config $key $value }}{{ end }}
{{- end }}
{{- with include "mmrouter.apiServerCidrs" . | fromJsonArray }}{{ $_ := set $config "apiServerCidrs" . }}{{ end }}
{{- toYaml $config }}
{{- end }}

{{- define "mmrouter.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "mmrouter.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* Who the rights are for. */}}
{{- define "mmrouter.subjects" -}}
- kind: ServiceAccount
  name: {{ .Values.serviceAccount.name | quote }}
  namespace: {{ .Release.Namespace | quote }}
{{- end }}

{{/* Egress that the pods of operator and gateway have in common. */}}
{{- define "mmrouter.nameServersAndApiServer" -}}
# Name servers; OpenShift's listen on 5353.
- ports:
  - {protocol: UDP, port: 53}
  - {protocol: TCP, port: 53}
  - {protocol: UDP, port: 5353}
  - {protocol: TCP, port: 5353}
# The API server.
- ports:
  - {protocol: TCP, port: 443}
  - {protocol: TCP, port: 6443}
  {{- with include "mmrouter.apiServerCidrs" . | fromJsonArray }}
  to:
  {{- range . }}
  - ipBlock: {cidr: {{ . | quote }}}
  {{- end }}
  {{- end }}
{{- end }}
