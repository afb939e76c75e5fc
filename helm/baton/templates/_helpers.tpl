{{/* Names of at most 40 characters: with a suffix they fit into 63, and the full name is a valid `name` of a cluster file. */}}
{{- define "baton.name" -}}
{{- default .Chart.Name .Values.nameOverride | replace "." "-" | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "baton.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride }}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | replace "." "-" | trunc 40 | trimSuffix "-" }}
{{- else if contains $name .Release.Name }}
{{- .Release.Name | replace "." "-" | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | replace "." "-" | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "baton.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}{{ default (include "baton.fullname" .) .Values.serviceAccount.name }}
{{- else }}{{ default "default" .Values.serviceAccount.name }}{{ end }}
{{- end }}

{{- define "baton.image" -}}
{{- $image := .Values.image }}
{{- if $image.digest }}{{ printf "%s@%s" $image.repository $image.digest }}
{{- else }}{{ printf "%s:%s" $image.repository (default .Chart.AppVersion $image.tag) }}{{ end }}
{{- end }}

{{/* Labels. Selector labels never change within a release: they have no version and no chart. */}}
{{- define "baton.releaseLabels" -}}
app.kubernetes.io/name: {{ include "baton.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "baton.selectorLabels" -}}
{{ include "baton.releaseLabels" .root }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "baton.labels" -}}
{{ include "baton.selectorLabels" . }}
app.kubernetes.io/part-of: baton
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "baton.podLabels" -}}
{{ toYaml (merge (include "baton.selectorLabels" . | fromYaml) (default dict (get .role "podLabels")) (default dict .root.Values.commonLabels)) }}
{{- end }}

{{/* Secrets that pods read. */}}
{{- define "baton.redisSecret" -}}
{{- if .Values.redis.install }}{{ default (printf "%s-redis" (include "baton.fullname" .)) .Values.redis.auth.existingSecret }}
{{- else }}{{ .Values.redis.external.existingSecret }}{{ end }}
{{- end }}

{{- define "baton.redisPasswordKey" -}}
{{- if .Values.redis.install }}{{ .Values.redis.auth.passwordKey }}{{ else }}{{ .Values.redis.external.passwordKey }}{{ end }}
{{- end }}

{{/* URL of Redis. The kubelet inserts the password, so that only the Secret contains it. */}}
{{- define "baton.redisUrl" -}}
{{- $external := .Values.redis.external }}
{{- $user := default "" $external.username | urlquery | replace "+" "%20" }}
{{- if .Values.redis.install -}}
redis://:$(REDIS_PASSWORD)@{{ include "baton.fullname" . }}-redis:6379/0
{{- else -}}
{{ ternary "rediss" "redis" $external.tls.enabled }}://
{{- if $external.existingSecret }}{{ $user }}:$(REDIS_PASSWORD)@{{ else if $user }}{{ $user }}@{{ end }}
{{- $external.host }}:{{ $external.port }}/{{ $external.db }}
{{- if include "baton.redisCa" . }}?ssl_ca_certs=/etc/baton-redis/{{ $external.tls.caKey }}{{ end }}
{{- end }}
{{- end }}

{{- define "baton.redisCa" -}}
{{- if and (not .Values.redis.install) .Values.redis.external.tls.enabled .Values.redis.external.tls.existingSecret }}true{{ end }}
{{- end }}

{{- define "baton.redisEnv" -}}
{{- if include "baton.redisSecret" . }}
- name: REDIS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ include "baton.redisSecret" . | quote }}, key: {{ include "baton.redisPasswordKey" . | quote }}}}
{{- end }}
- name: BATON__REDIS__URL
  value: {{ include "baton.redisUrl" . | quote }}
{{- end }}

{{/* Name that certificates must contain. */}}
{{- define "baton.tlsName" -}}
{{- default (printf "%s-router.%s.svc" (include "baton.fullname" .) .Release.Namespace) .Values.security.tls.name }}
{{- end }}

{{/* Path of the model, and whether a volume has it. */}}
{{- define "baton.modelVolume" -}}
{{- if or .Values.model.existingClaim .Values.model.pvc.create (hasPrefix "hf:" .Values.model.path) }}true{{ end }}
{{- end }}

{{- define "baton.modelPath" -}}
{{- $path := .Values.model.path }}
{{- if or (hasPrefix "hf:" $path) (hasPrefix "/" $path) (not (include "baton.modelVolume" .)) }}{{ $path }}
{{- else }}{{ printf "%s/%s" (trimSuffix "/" .Values.model.mountPath) $path }}{{ end }}
{{- end }}

{{/* Whether to create an object that needs a CRD. null means: if the cluster has the CRD. */}}
{{- define "baton.wanted" -}}
{{- if kindIs "invalid" .enabled }}{{ if .root.Capabilities.APIVersions.Has .api }}true{{ end }}
{{- else if .enabled }}true{{ end }}
{{- end }}
