{{/* Bytes of a Kubernetes quantity. */}}
{{- define "alchemist.bytes" -}}
{{- $number := regexFind "^[0-9.]+" . -}}
{{- $units := fromJson "{\"\": 1, \"k\": 1000, \"M\": 1000000, \"G\": 1000000000, \"T\": 1000000000000, \"Ki\": 1024, \"Mi\": 1048576, \"Gi\": 1073741824, \"Ti\": 1099511627776}" -}}
{{- int64 (mulf (float64 $number) (float64 (get $units (trimPrefix $number .)))) -}}
{{- end }}
{{/* Ray's object store, a part of a pod's memory. */}}
{{- define "alchemist.store" -}}
{{- div (mul (include "alchemist.bytes" . | int64) 3) 10 -}}
{{- end }}
{{/* The queue of the gang scheduler; nothing if it has no queues. */}}
{{- define "alchemist.queue" -}}
{{- $usual := get (fromJson "{\"volcano\": \"default\", \"yunikorn\": \"root.default\", \"kueue\": \"alchemist\"}") .Values.gang -}}
{{- if $usual }}{{ .Values.queue | default $usual }}{{ end -}}
{{- end }}

{{- /* Whether there are NetworkPolicies. Pods on the network of their node have its addresses. */}}
{{- define "alchemist.policies" -}}
{{- if and .Values.networkPolicy (or (not .Values.hostNetwork) .Values.nodeNetworks) }}yes{{ end }}
{{- end }}
