{{/* What the objects of all three processes have in common. A process is "operator", "gateway" or "metrics". */}}

{{/* Labels of an object: include "conveyor.labels" (dict "root" $ "process" "gateway") */}}
{{- define "conveyor.labels" -}}
{{ include "conveyor.selector" . }}
app.kubernetes.io/part-of: conveyor
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{/* Labels by which a process's pods are found; they never change. */}}
{{- define "conveyor.selector" -}}
app.kubernetes.io/name: conveyor-{{ .process }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- end }}

{{/* Where and as whom a process's pod runs. Fits the Pod Security level "restricted". */}}
{{- define "conveyor.pod" -}}
{{- $own := index .root.Values .process -}}
serviceAccountName: conveyor-{{ .process }}
# Or Service conveyor-gateway would set CONVEYOR_GATEWAY_PORT, which is a setting.
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  {{- with .root.Values.userId }}
  runAsUser: {{ int64 . }}
  runAsGroup: {{ int64 . }}
  {{- end }}
  seccompProfile: {type: RuntimeDefault}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with $own.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* The image, the rights and the resources of a process's container. */}}
{{- define "conveyor.container" -}}
{{- $image := .root.Values.image -}}
name: {{ .process }}
image: "{{ $image.repository }}:{{ $image.tag | default .root.Chart.AppVersion }}"
imagePullPolicy: {{ $image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- with (index .root.Values .process).resources }}
resources: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Two pods on one node are one failure; better than none where there is only one node. */}}
{{- define "conveyor.spread" -}}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "conveyor.selector" . | nindent 8 }}
{{- end }}

{{/* The ServiceAccount of a process. */}}
{{- define "conveyor.account" -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: conveyor-{{ .process }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{- include "conveyor.labels" . | nindent 4 }}
{{- end }}

{{/* Grants ClusterRole conveyor-<process> in the watched namespaces, or everywhere. */}}
{{- define "conveyor.binding" -}}
{{- $reference := dict "apiGroup" "rbac.authorization.k8s.io" "kind" "ClusterRole" "name" (printf "conveyor-%s" .process) }}
{{- $subject := dict "kind" "ServiceAccount" "name" (printf "conveyor-%s" .process) "namespace" .root.Release.Namespace }}
{{- range .root.Values.watchNamespaces | default (list "") }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ . | empty | ternary "ClusterRoleBinding" "RoleBinding" }}
metadata:
  name: conveyor-{{ $.process }}
  {{- with . }}
  namespace: {{ . }}
  {{- end }}
  labels: {{- include "conveyor.labels" $ | nindent 4 }}
roleRef: {{- toYaml $reference | nindent 2 }}
subjects: {{- toYaml (list $subject) | nindent 2 }}
{{- end }}
{{- end }}

{{/* Prometheus, for the port of a process that nobody else may ask: peers of a NetworkPolicy, or none. */}}
{{- define "conveyor.prometheus" -}}
{{- range .Values.networkPolicies.prometheusNamespaces }}
- namespaceSelector:
    matchLabels: {kubernetes.io/metadata.name: {{ . }}}
{{- end }}
{{- end }}

{{/* At most one pod of a process is taken away at a time; with one replica that is the only one, or no node would drain. */}}
{{- define "conveyor.budget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: conveyor-{{ .process }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{- include "conveyor.labels" . | nindent 4 }}
spec:
  maxUnavailable: 1
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels: {{- include "conveyor.selector" . | nindent 6 }}
{{- end }}
