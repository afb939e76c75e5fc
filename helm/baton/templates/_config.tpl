{{/* The cluster file: `config` of the values, overridden by the keys that the chart sets. */}}
{{- define "baton.owned" -}}
name: {{ default (include "baton.fullname" .) .Values.clusterName | quote }}
model: {path: {{ include "baton.modelPath" . | quote }}}
ray: {address: auto}
router:
  replicas: 1
  grpc: "0.0.0.0:50051"
  http: {{ ternary "0.0.0.0:8000" "null" .Values.router.http }}
  metrics: "0.0.0.0:9100"
  admin: "0.0.0.0:50052"
  interface: {{ .Values.network.interface | quote }}
  drain_s: {{ max 1 (sub (sub (int .Values.router.terminationGracePeriodSeconds) (int .Values.router.preStopSeconds)) 10) }}
prefill:
  {{- include "baton.ownedPool" (dict "root" . "pool" "prefill") | nindent 2 }}
decode:
  {{- include "baton.ownedPool" (dict "root" . "pool" "decode") | nindent 2 }}
security:
  {{- with .Values.security.tls.existingSecret }}
  tls: {cert: /etc/baton-tls/tls.crt, key: /etc/baton-tls/tls.key, ca: /etc/baton-tls/ca.crt, name: {{ include "baton.tlsName" $ | quote }}}
  {{- end }}
  {{- with .Values.security.tokens.existingSecret }}
  tokens: /etc/baton-tokens/tokens.yaml
  {{- end }}
  {{- with .Values.security.receiptKey.existingSecret }}
  receipt_key: /etc/baton-receipts/receipt.pem
  {{- end }}
  allow_insecure: {{ ternary "true" (printf "[router.metrics, prefill.metrics, decode.metrics%s]" (ternary ", transfer.transport" "" .Values.security.allowPlainKv)) .Values.security.allowInsecure }}
{{- end }}

{{- define "baton.ownedPool" -}}
{{- $pool := index .root.Values .pool -}}
replicas: {{ $pool.replicas }}
listen: "0.0.0.0:50061"
metrics: "0.0.0.0:9101"
interface: {{ .root.Values.network.interface | quote }}
node_labels: {baton.io/pool: {{ .pool }}}
device: {{ ternary "cuda" "cpu" (gt (int $pool.gpus) 0) }}
{{- if gt (int $pool.gpus) 0 }}
tensor_parallel: {{ $pool.gpus }}
{{- end }}
{{- if $pool.autoscale.enabled }}
autoscale: {min: {{ $pool.autoscale.min }}, max: {{ $pool.autoscale.max }}}
{{- end }}
{{- end }}

{{/* Pools that have pods. In mode colocated, the decode pool has the workers of both pools. */}}
{{- define "baton.pools" -}}
{{ ternary "decode" "prefill decode" (eq (toString (get (default dict .Values.config) "mode")) "colocated") }}
{{- end }}

{{- define "baton.clusterFile" -}}
{{ toYaml (mergeOverwrite (deepCopy (default dict .Values.config)) (include "baton.owned" . | fromYaml)) }}
{{- end }}
