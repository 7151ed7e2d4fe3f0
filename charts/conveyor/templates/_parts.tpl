{{/* What the objects of all three processes have in common. A process is "operator", "gateway" or "metrics". */}}

{{/* Labels of an object: include "conveyor.labels" (dict "root" $ "process" "gateway"); "labels" may be more of them. */}}
{{- define "conveyor.labels" -}}
{{- include "conveyor.ownLabels" (merge dict (.labels | default dict) .root.Values.commonLabels) }}
{{ include "conveyor.selector" . }}
app.kubernetes.io/part-of: conveyor
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{/* Labels that people want. Those of the chart's own prefixes would be there twice. */}}
{{- define "conveyor.ownLabels" -}}
{{- range $key, $value := . }}
{{- if or (hasPrefix "app.kubernetes.io/" $key) (hasPrefix "helm.sh/" $key) }}
{{- fail (printf "label %s is the chart's own; choose another key for commonLabels, labels or podLabels" $key) }}
{{- end }}
{{ $key }}: {{ $value | quote }}
{{- end }}
{{- end }}

{{/* Labels by which a process's pods are found; they never change. */}}
{{- define "conveyor.selector" -}}
app.kubernetes.io/name: conveyor-{{ .process }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- end }}

{{/* What a Deployment is called, and what people want written on it. */}}
{{- define "conveyor.deployment" -}}
{{- $own := index .root.Values .process -}}
name: conveyor-{{ .process }}
namespace: {{ .root.Release.Namespace }}
labels: {{- include "conveyor.labels" (merge (dict "labels" $own.labels) .) | nindent 2 }}
{{- with $own.annotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/*
What is written on a process's pods; "annotations" of the argument are the chart's own. By default, the Cluster
Autoscaler removes no node with a pod that has a volume on the node; what is in /tmp here may be lost.
*/}}
{{- define "conveyor.marks" -}}
{{- $own := index .root.Values .process -}}
{{- $evictable := dict "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes" "tmp" -}}
labels:
  {{- include "conveyor.ownLabels" (merge dict $own.podLabels .root.Values.commonLabels) | indent 2 }}
  {{- include "conveyor.selector" . | nindent 2 }}
annotations: {{- toYaml (merge dict (.annotations | default dict) $own.podAnnotations $evictable) | nindent 2 }}
{{- end }}

{{/* Where and as whom a process's pod runs. As it stands it fits the Pod Security level "restricted". */}}
{{- define "conveyor.pod" -}}
{{- $own := index .root.Values .process -}}
{{- $context := dict "runAsNonRoot" true "seccompProfile" (dict "type" "RuntimeDefault") -}}
{{- with .root.Values.userId -}}
{{- $context = merge $context (dict "runAsUser" (int64 .) "runAsGroup" (int64 .)) -}}
{{- end -}}
serviceAccountName: {{ .account | default (include "conveyor.accountName" .) }}
automountServiceAccountToken: true
# Or Service conveyor-gateway would set CONVEYOR_GATEWAY_PORT, which is a setting.
enableServiceLinks: false
securityContext: {{- toYaml (mergeOverwrite $context $own.podSecurityContext) | nindent 2 }}
{{- with .root.Values.imagePullSecrets | default .root.Values.global.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - {name: {{ if kindIs "map" . }}{{ .name | quote }}{{ else }}{{ . | quote }}{{ end }}}
  {{- end }}
{{- end }}
{{- with $own.priorityClassName | default (.root.Values.priorityClass.create | ternary (include "conveyor.priorityClass" .) "") }}
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
# Two pods on one node are one failure; better than none where there is only one node.
# Without matchLabelKeys, the pods that a rollout replaces count too, so the new ones would avoid the nodes of the old ones.
{{- $spread := dict "maxSkew" 1 "topologyKey" "kubernetes.io/hostname" "whenUnsatisfiable" "ScheduleAnyway" "matchLabelKeys" (list "pod-template-hash") }}
topologySpreadConstraints:
  {{- range $own.topologySpreadConstraints | default (list $spread) }}
  - {{ toYaml (omit . "labelSelector") | nindent 4 | trim }}
    labelSelector:
      {{- with .labelSelector }}
      {{- toYaml . | nindent 6 }}
      {{- else }}
      matchLabels: {{- include "conveyor.selector" $ | nindent 8 }}
      {{- end }}
  {{- end }}
{{- end }}

{{/* Volumes of every process; its own come before. */}}
{{- define "conveyor.volumes" -}}
- name: tmp
  emptyDir: {sizeLimit: 16Mi}
{{- with (index .root.Values .process).volumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "conveyor.volumeMounts" -}}
- {name: tmp, mountPath: /tmp}
{{- with (index .root.Values .process).volumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* The name of the release's PriorityClass. */}}
{{- define "conveyor.priorityClass" -}}
conveyor{{ if ne .root.Release.Namespace "conveyor-system" }}-{{ .root.Release.Namespace }}{{ end }}
{{- end }}

{{/* An image by its digest or else its tag: include "conveyor.image" (dict "root" $ "image" .Values.image) */}}
{{- define "conveyor.image" -}}
{{- with .root.Values.imageRegistry | default .root.Values.global.imageRegistry }}{{ . }}/{{ end -}}
{{- .image.repository -}}
{{- if .image.digest }}@{{ .image.digest }}{{ else }}:{{ .image.tag | default .root.Chart.AppVersion }}{{ end -}}
{{- end }}

{{/* The image, the rights, the environment and the resources of a process's container. */}}
{{- define "conveyor.container" -}}
{{- $own := index .root.Values .process -}}
{{- $capabilities := dict "drop" (list "ALL") -}}
{{- $context := dict "allowPrivilegeEscalation" false "readOnlyRootFilesystem" true "capabilities" $capabilities -}}
name: {{ .process }}
image: {{ include "conveyor.image" (dict "root" .root "image" .root.Values.image) | quote }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext: {{- toYaml (mergeOverwrite $context $own.securityContext) | nindent 2 }}
{{- $traces := has .process (list "gateway" "operator") | ternary (include "conveyor.tracesEnv" .root | fromYamlArray) list }}
{{- with include "conveyor.env" (dict "defaults" (concat (.env | default list) $traces) "own" $own.env) | fromYamlArray }}
env: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.envFrom }}
envFrom: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.resources }}
{{- $resources := deepCopy . }}
{{- if and ($own.tls).secretName (hasSuffix "Mi" (toString (.requests).memory)) }}
{{- $memory := trimSuffix "Mi" .requests.memory }}
{{- $_ := set $resources.requests "memory" (printf "%dMi" (add $memory 90)) }}{{/* of connections: docs/tls.md */}}
{{- end }}
resources: {{- toYaml $resources | nindent 2 }}
{{- end }}
{{- end }}

{{/* Own variables, after those defaults that they do not set: a name may be there only once. */}}
{{- define "conveyor.env" -}}
{{- $names := list }}
{{- range .own }}{{ $names = append $names .name }}{{ end }}
{{- $env := list }}
{{- range .defaults }}{{ if not (has .name $names) }}{{ $env = append $env . }}{{ end }}{{ end }}
{{- concat $env (.own | default list) | toYaml }}
{{- end }}

{{/* The variables with which a program exports traces. Engines follow the gateways' choice of requests. */}}
{{- define "conveyor.tracesEnv" -}}
{{- with .Values.traces }}
{{- if .endpoint }}
- {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ .endpoint | quote }}}
- {name: OTEL_TRACES_SAMPLER, value: parentbased_traceidratio}
- {name: OTEL_TRACES_SAMPLER_ARG, value: {{ .ratio | quote }}}
{{- end }}
{{- end }}
{{- end }}

{{/* The profiles, where the engines of all services get the collector of traces from. */}}
{{- define "conveyor.profiles" -}}
{{- $profiles := deepCopy .Values.profiles }}
{{- with (.Values.traces).endpoint }}
{{- $default := $profiles.default | default dict }}
{{- $pod := $default.pod | default dict }}
{{- $collector := list (dict "name" "OTEL_EXPORTER_OTLP_ENDPOINT" "value" .) }}
{{- $env := include "conveyor.env" (dict "defaults" $collector "own" $pod.env) | fromYamlArray }}
{{- $_ := set $profiles "default" (merge (dict "pod" (merge (dict "env" $env) $pod)) $default) }}
{{- end }}
{{- with $profiles }}
{{- toYaml . }}
{{- end }}
{{- end }}

{{/* The ServiceAccount that a process runs as. */}}
{{- define "conveyor.accountName" -}}
{{- (index .root.Values .process).serviceAccount.name | default (printf "conveyor-%s" .process) -}}
{{- end }}

{{/* It, as the subject of a binding. */}}
{{- define "conveyor.subject" -}}
{kind: ServiceAccount, name: {{ include "conveyor.accountName" . }}, namespace: {{ .root.Release.Namespace }}}
{{- end }}

{{/* The ServiceAccount, unless it is somebody else's. */}}
{{- define "conveyor.account" -}}
{{- $account := (index .root.Values .process).serviceAccount -}}
{{- if $account.create -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ include "conveyor.accountName" . }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{- include "conveyor.labels" . | nindent 4 }}
  {{- with $account.annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
# Only the chart's pods, which ask for the token, get it.
automountServiceAccountToken: false
{{- end }}
{{- end }}

{{/* What a release has for the whole cluster is named after its namespace, where that is not the usual one. */}}
{{- define "conveyor.clusterRole" -}}
conveyor-{{ .process }}
{{- if ne .root.Release.Namespace "conveyor-system" }}-{{ .root.Release.Namespace }}{{ end }}
{{- end }}

{{/*
A process's rights for InferenceServices, which "rules" lists: Roles in the watched namespaces, or one ClusterRole. With
Roles, nobody needs rights for the whole cluster to install a release.
*/}}
{{- define "conveyor.rights" -}}
{{- range .root.Values.watchNamespaces | default (list "") }}
{{- $prefix := . | empty | ternary "Cluster" "" }}
{{- $name := printf "%s%s" (include "conveyor.clusterRole" $) (. | empty | ternary "" "-services") }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ $prefix }}Role
metadata:
  name: {{ $name }}
  {{- with . }}
  namespace: {{ . }}
  {{- end }}
  labels: {{- include "conveyor.labels" $ | nindent 4 }}
rules:
  {{- $.rules | trim | nindent 2 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ $prefix }}RoleBinding
metadata:
  name: {{ $name }}
  {{- with . }}
  namespace: {{ . }}
  {{- end }}
  labels: {{- include "conveyor.labels" $ | nindent 4 }}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: {{ $prefix }}Role, name: {{ $name }}}
subjects:
  - {{ include "conveyor.subject" $ }}
{{- end }}
{{- end }}

{{/* The pods of namespaces, for a port that nobody else may ask: peers of a NetworkPolicy, or none. */}}
{{- define "conveyor.peers" -}}
{{- range . }}
- namespaceSelector:
    matchLabels: {kubernetes.io/metadata.name: {{ . | quote }}}
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

{{- /* The gateway's URL in the cluster if it serves TLS, otherwise nothing. */}}
{{- define "conveyor.httpsUrl" -}}
{{- if .Values.gateway.tls.secretName -}}
https://conveyor-gateway.{{ .Release.Namespace }}.svc.{{ .Values.clusterDomain }}
{{- end -}}
{{- end -}}

{{- /* The gateway's URL in the cluster. */}}
{{- define "conveyor.gatewayUrl" -}}
{{ include "conveyor.httpsUrl" . | default (printf "http://conveyor-gateway.%s.svc.%s" .Release.Namespace .Values.clusterDomain) }}
{{- end -}}
