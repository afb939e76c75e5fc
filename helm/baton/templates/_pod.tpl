{{/* Parts of all pods with Baton's image. Each template takes {root, component, role}; role is a section of the values. */}}
{{- define "baton.podSpec" -}}
serviceAccountName: {{ include "baton.serviceAccountName" .root | quote }}
automountServiceAccountToken: {{ and (eq .component "head") .root.Values.ray.autoscaling.enabled }}
enableServiceLinks: false
{{- with .root.Values.podSecurityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- include "baton.scheduling" . }}
{{- end }}

{{- define "baton.scheduling" -}}
{{- range $key := list "nodeSelector" "tolerations" "topologySpreadConstraints" }}
{{- with index $.role $key }}
{{ $key }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- range $key := list "priorityClassName" "runtimeClassName" "schedulerName" }}
{{- with index $.role $key }}
{{ $key }}: {{ . | quote }}
{{- end }}
{{- end }}
{{- with .role.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- else }}
{{- if and .root.Values.network.topologyKey (has .component (list "prefill" "decode")) }}
affinity:
  podAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      - labelSelector: {matchLabels: {ray.io/cluster: {{ include "baton.fullname" .root | quote }}, ray.io/node-type: worker}}
        topologyKey: {{ .root.Values.network.topologyKey | quote }}
{{- end }}
{{- end }}
{{- end }}

{{- define "baton.containerCommon" -}}
image: {{ include "baton.image" .root | quote }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
{{- $context := deepCopy (default dict .root.Values.containerSecurityContext) }}
{{- if and .root.Values.network.rdma.enabled (has .component (list "prefill" "decode")) }}
{{- $context = mergeOverwrite $context (default dict .root.Values.network.rdma.securityContext) }}
{{- end }}
{{- with $context }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "baton.env" -}}
{{- $values := .root.Values }}
- {name: HOME, value: /var/lib/baton}
- {name: BATON_HOME, value: /var/lib/baton/clusters}
- {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
{{ include "baton.redisEnv" .root | trim }}
{{- if hasPrefix "hf:" $values.model.path }}
- {name: HF_HOME, value: {{ $values.model.mountPath | quote }}}
{{- with $values.model.hub.existingSecret }}
- {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: {{ . | quote }}, key: {{ $values.model.hub.key | quote }}}}}
{{- end }}
{{- with $values.model.hub.endpoint }}
- {name: HF_ENDPOINT, value: {{ . | quote }}}
{{- end }}
{{- end }}
{{- with $values.tracing.endpoint }}
- {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ . | quote }}}
- {name: OTEL_SERVICE_NAME, value: {{ printf "%s-%s" (include "baton.fullname" $.root) $.component | quote }}}
{{- end }}
{{- range $name, $value := $values.tracing.env }}
- {name: {{ $name | quote }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}

{{- define "baton.rayEnv" -}}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
{{- if and .root.Values.ray.gcsFaultTolerance.enabled (include "baton.redisCa" .root) }}
- {name: RAY_REDIS_CA_CERT, value: {{ printf "/etc/baton-redis/%s" .root.Values.redis.external.tls.caKey | quote }}}
{{- end }}
{{- end }}

{{/* Environment of all containers of a role, init containers included. It comes last, so that it takes precedence. */}}
{{- define "baton.extraEnv" -}}
{{- $ray := ternary .root.Values.ray.extraEnv list (has .component (list "head" "prefill" "decode")) }}
{{- with concat (default list $ray) (default list .role.extraEnv) }}
{{- toYaml . }}
{{- end }}
{{- end }}

{{- define "baton.resources" -}}
{{- with .role.resources }}
resources:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "baton.ncclEnv" -}}
{{- $interface := .root.Values.network.interface }}
- {name: GLOO_SOCKET_IFNAME, value: {{ $interface | quote }}}
{{- if .role.gpus }}
{{- $env := dict "NCCL_SOCKET_IFNAME" $interface "NCCL_IB_DISABLE" (ternary "0" "1" .root.Values.network.rdma.enabled) }}
{{- range $name, $value := mergeOverwrite $env (default dict .root.Values.network.nccl.env) }}
- {name: {{ $name | quote }}, value: {{ $value | quote }}}
{{- end }}
- {name: TRITON_CACHE_DIR, value: {{ printf "%s/triton" .root.Values.kernelCache.mountPath | quote }}}
- {name: TORCHINDUCTOR_CACHE_DIR, value: {{ printf "%s/inductor" .root.Values.kernelCache.mountPath | quote }}}
{{- end }}
{{- end }}

{{- define "baton.volumeMounts" -}}
- {name: config, mountPath: /etc/baton, readOnly: true}
- {name: tmp, mountPath: /tmp}
- {name: home, mountPath: /var/lib/baton}
{{- if .root.Values.security.tls.existingSecret }}
- {name: tls, mountPath: /etc/baton-tls, readOnly: true}
{{- end }}
{{- if .root.Values.security.tokens.existingSecret }}
- {name: tokens, mountPath: /etc/baton-tokens, readOnly: true}
{{- end }}
{{- if and .root.Values.security.receiptKey.existingSecret (eq .component "router") }}
- {name: receipt-key, mountPath: /etc/baton-receipts, readOnly: true}
{{- end }}
{{- if include "baton.redisCa" .root }}
- {name: redis-ca, mountPath: /etc/baton-redis, readOnly: true}
{{- end }}
{{- with include "baton.modelMount" . }}
{{ trim . }}
{{- end }}
{{- if get .role "gpus" }}
- {name: kernels, mountPath: {{ .root.Values.kernelCache.mountPath | quote }}}
{{- end }}
{{- with .role.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "baton.modelMount" -}}
{{- $model := .root.Values.model }}
{{- if include "baton.modelVolume" .root }}
- name: model
  mountPath: {{ $model.mountPath | quote }}
  readOnly: {{ not (hasPrefix "hf:" $model.path) }}
  {{- with $model.subPath }}
  subPath: {{ . | quote }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "baton.volumes" -}}
{{- $values := .root.Values -}}
- name: config
  configMap: {name: {{ include "baton.fullname" .root }}-config}
- name: tmp
  emptyDir: {sizeLimit: {{ default "2Gi" (get .role "tmpSize") | quote }}}
- name: home
  emptyDir: {sizeLimit: 2Gi}
{{- with $values.security.tls.existingSecret }}
- name: tls
  secret: {secretName: {{ . | quote }}, defaultMode: 288, items: [{key: ca.crt, path: ca.crt}, {key: tls.crt, path: tls.crt}, {key: tls.key, path: tls.key}]}
{{- end }}
{{- with $values.security.tokens.existingSecret }}
- name: tokens
  secret: {secretName: {{ . | quote }}, defaultMode: 288, items: [{key: {{ $values.security.tokens.key | quote }}, path: tokens.yaml}]}
{{- end }}
{{- if and $values.security.receiptKey.existingSecret (eq .component "router") }}
- name: receipt-key
  secret: {secretName: {{ $values.security.receiptKey.existingSecret | quote }}, defaultMode: 288, items: [{key: {{ $values.security.receiptKey.key | quote }}, path: receipt.pem}]}
{{- end }}
{{- if include "baton.redisCa" .root }}
- name: redis-ca
  secret: {secretName: {{ $values.redis.external.tls.existingSecret | quote }}, defaultMode: 288, items: [{key: {{ $values.redis.external.tls.caKey | quote }}, path: {{ $values.redis.external.tls.caKey | quote }}}]}
{{- end }}
{{- if include "baton.modelVolume" .root }}
- name: model
  {{- if or $values.model.existingClaim $values.model.pvc.create }}
  persistentVolumeClaim: {claimName: {{ default (printf "%s-model" (include "baton.fullname" .root)) $values.model.existingClaim | quote }}}
  {{- else }}
  emptyDir: {}
  {{- end }}
{{- end }}
{{- if get .role "gpus" }}
- name: kernels
  {{- with $values.kernelCache.existingClaim }}
  persistentVolumeClaim: {claimName: {{ . | quote }}}
  {{- else }}
  emptyDir: {sizeLimit: {{ $values.kernelCache.size | quote }}}
  {{- end }}
{{- end }}
{{- with .role.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Waits for the model: workers download it, or all pods wait until it is on the volume. */}}
{{- define "baton.initContainers" -}}
{{- $model := .root.Values.model }}
{{- if and (include "baton.modelVolume" .root) (or (has .component (list "prefill" "decode")) (and (eq .component "router") (not (hasPrefix "hf:" $model.path)))) }}
- name: model
  {{- include "baton.containerCommon" . | nindent 2 }}
  {{- if hasPrefix "hf:" $model.path }}
  command: [timeout, {{ $model.waitSeconds | quote }}, baton, pull, {{ $model.path | quote }}]
  {{- else }}
  command:
    - timeout
    - {{ $model.waitSeconds | quote }}
    - bash
    - -c
    - until [ -e "$0/config.json" ] || [ -f "$0" ]; do echo "waiting for $0/config.json"; sleep 5; done
    - {{ include "baton.modelPath" .root | quote }}
  {{- end }}
  env:
    {{- include "baton.env" . | trim | nindent 4 }}
    {{- include "baton.extraEnv" . | nindent 4 }}
  {{- include "baton.resources" . | nindent 2 }}
  volumeMounts:
    {{- include "baton.modelMount" . | trim | nindent 4 }}
    - {name: tmp, mountPath: /tmp}
    - {name: home, mountPath: /var/lib/baton}
    {{- with .role.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
{{- end }}
