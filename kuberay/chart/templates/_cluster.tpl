{{/* The specification of the cluster, of a RayCluster or in a RayJob. */}}
{{- define "alchemist.cluster" -}}
rayVersion: "2.60.0"
authOptions:
  mode: token
{{- with .Values.gcsFaultTolerance }}
gcsFaultToleranceOptions: {{ toJson . }}
{{- end }}
{{- if .Values.autoscale }}
enableInTreeAutoscaling: true
autoscalerOptions:
  version: v2
  idleTimeoutSeconds: {{ int .Values.idleTimeoutS }}
  imagePullPolicy: {{ .Values.pullPolicy | toString | quote }}
  resources:
    requests:
      cpu: "500m"
      memory: "1Gi"
      ephemeral-storage: "1Gi"
    limits:
      cpu: "500m"
      memory: "1Gi"
      ephemeral-storage: "1Gi"
  securityContext:
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities:
      drop:
      - ALL
  env:
  - name: HOME
    value: "/tmp"
  volumeMounts:
  - name: autoscaler-tmp
    mountPath: "/tmp"
  - name: autoscaler-token
    mountPath: "/var/run/secrets/kubernetes.io/serviceaccount"
    readOnly: true
{{- end }}
headGroupSpec:
  serviceType: ClusterIP
  rayStartParams:
    num-cpus: "0"
    object-store-memory: {{ include "alchemist.store" .Values.headMemory | toString | quote }}
    node-manager-port: "6380"
    object-manager-port: "6381"
    runtime-env-agent-port: "6382"
    dashboard-agent-grpc-port: "6383"
    dashboard-agent-listen-port: "52365"
    metrics-export-port: "8080"
    min-worker-port: "11000"
    max-worker-port: "11999"
    dashboard-host: "0.0.0.0"
  template:
    metadata:
      labels:
        app.kubernetes.io/part-of: alchemist-on-ray
        app.kubernetes.io/instance: {{ .Release.Name | toString | quote }}
        app.kubernetes.io/component: head
      {{- with .Values.annotations }}
      annotations: {{ toJson . }}
      {{- end }}
    spec:
      {{- with .Values.priorityClassName }}
      priorityClassName: {{ . | quote }}
      {{- end }}
      {{- with .Values.pullSecrets }}
      imagePullSecrets: {{ toJson . }}
      {{- end }}
      {{- with .Values.headNodeSelector }}
      nodeSelector: {{ toJson . }}
      {{- end }}
      {{- with .Values.headTolerations }}
      tolerations: {{ toJson . }}
      {{- end }}
      {{- if .Values.autoscale }}
      serviceAccountName: "{{ .Release.Name }}-autoscaler"
      {{- else }}
      serviceAccountName: {{ .Release.Name | toString | quote }}
      {{- end }}
      automountServiceAccountToken: false
      enableServiceLinks: false
      terminationGracePeriodSeconds: 30
      securityContext:
        runAsNonRoot: true
        runAsUser: 1000
        runAsGroup: 1000
        fsGroup: 1000
        seccompProfile:
          type: RuntimeDefault
      containers:
      - name: ray-head
        image: {{ .Values.image | toString | quote }}
        imagePullPolicy: {{ .Values.pullPolicy | toString | quote }}
        command:
        - tini
        - "--"
        - "/bin/bash"
        - "-c"
        args:
        {{- if not .Values.gateway }}
        - "ulimit -n 65536; eval exec \"$KUBERAY_GEN_RAY_START_CMD\""
        {{- else }}
        - "files=(/var/run/secrets/alchemist-gateway/tls.*)\nuntil alchemist gateway --port 24960 --tokens /var/run/secrets/alchemist-gateway/tokens.json \\\n  ${files[1]:+--certfile \"${files[0]}\" --keyfile \"${files[1]}\"}; do sleep 5; done &\nulimit -n 65536; eval exec \"$KUBERAY_GEN_RAY_START_CMD\""
        {{- end }}
        env:
        - name: HOME
          value: "/tmp"
        - name: RAY_USAGE_STATS_ENABLED
          value: "0"
        - name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S
          value: "5"
        {{- if .Values.autoscale }}
        - name: ALCHEMIST_GROWS_TO
          value: "{{ int .Values.workers }}x{{ int .Values.cpus }}"
        {{- end }}
        ports:
        - name: gcs-server
          containerPort: 6379
        - name: dashboard
          containerPort: 8265
        - name: metrics
          containerPort: 8080
        - name: as-metrics
          containerPort: 44217
        - name: dash-metrics
          containerPort: 44227
        {{- if .Values.gateway }}
        - name: gateway
          containerPort: 24960
        {{- end }}
        resources:
          requests:
            cpu: {{ .Values.headCpus | toString | quote }}
            memory: {{ .Values.headMemory | toString | quote }}
            ephemeral-storage: {{ .Values.storage | toString | quote }}
          limits:
            cpu: {{ .Values.headCpus | toString | quote }}
            memory: {{ .Values.headMemory | toString | quote }}
            ephemeral-storage: {{ .Values.storage | toString | quote }}
        startupProbe:
          httpGet:
            path: "/api/healthz"
            port: 52365
          periodSeconds: 5
          timeoutSeconds: 5
          failureThreshold: 60
        readinessProbe:
          {{- if .Values.gateway }}
          exec:
            command:
            - "/bin/bash"
            - "-c"
            - "grep -qsE ':6180 0+:0000 0A' /proc/net/tcp /proc/net/tcp6 || { echo 'no gateway listens at port 24960: the log of this container has the reason'; exit 1; }"
          {{- else }}
          httpGet:
            path: "/api/healthz"
            port: 52365
          {{- end }}
          periodSeconds: 5
          timeoutSeconds: 5
          failureThreshold: 10
        livenessProbe:
          httpGet:
            path: "/api/healthz"
            port: 52365
          periodSeconds: 10
          timeoutSeconds: 5
          failureThreshold: 30
        lifecycle:
          preStop:
            exec:
              command:
              - "/bin/bash"
              - "-c"
              - "kill -TERM 1; sleep 1; for pid in /tmp/alchemist-*/pid; do [ -f \"$pid\" ] && kill -TERM \"$(<\"$pid\")\"; done; sleep 1"
        securityContext:
          allowPrivilegeEscalation: false
          readOnlyRootFilesystem: true
          capabilities:
            drop:
            - ALL
        volumeMounts:
        - name: tmp
          mountPath: "/tmp"
        {{- with .Values.volumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
        {{- if .Values.gateway }}
        - name: gateway
          mountPath: "/var/run/secrets/alchemist-gateway"
          readOnly: true
        {{- end }}
      volumes:
      - name: tmp
        emptyDir:
          sizeLimit: {{ .Values.storage | toString | quote }}
      {{- with .Values.volumes }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
      {{- if .Values.gateway }}
      - name: gateway
        secret:
          secretName: "{{ .Release.Name }}-gateway"
          optional: true
          defaultMode: 288
      {{- end }}
      {{- if .Values.autoscale }}
      - name: autoscaler-tmp
        emptyDir:
          sizeLimit: "1Gi"
      - name: autoscaler-token
        projected:
          sources:
          - serviceAccountToken:
              path: token
              expirationSeconds: 3607
          - configMap:
              name: kube-root-ca.crt
              items:
              - key: ca.crt
                path: ca.crt
          - downwardAPI:
              items:
              - path: namespace
                fieldRef:
                  fieldPath: metadata.namespace
      {{- end }}
workerGroupSpecs:
- groupName: mpi
  {{- $least := ternary 0 (int .Values.workers) .Values.autoscale }}
  replicas: {{ $least }}
  minReplicas: {{ $least }}
  maxReplicas: {{ int .Values.workers }}
  rayStartParams:
    num-cpus: {{ int .Values.cpus | toString | quote }}
    object-store-memory: {{ include "alchemist.store" .Values.memory | toString | quote }}
    node-manager-port: "6380"
    object-manager-port: "6381"
    runtime-env-agent-port: "6382"
    dashboard-agent-grpc-port: "6383"
    dashboard-agent-listen-port: "52365"
    metrics-export-port: "8080"
    min-worker-port: "11000"
    max-worker-port: "11999"
  template:
    metadata:
      labels:
        app.kubernetes.io/part-of: alchemist-on-ray
        app.kubernetes.io/instance: {{ .Release.Name | toString | quote }}
        app.kubernetes.io/component: worker
      {{- with .Values.annotations }}
      annotations: {{ toJson . }}
      {{- end }}
    spec:
      {{- with .Values.priorityClassName }}
      priorityClassName: {{ . | quote }}
      {{- end }}
      {{- with .Values.pullSecrets }}
      imagePullSecrets: {{ toJson . }}
      {{- end }}
      {{- with .Values.nodeSelector }}
      nodeSelector: {{ toJson . }}
      {{- end }}
      {{- with .Values.tolerations }}
      tolerations: {{ toJson . }}
      {{- end }}
      serviceAccountName: {{ .Release.Name | toString | quote }}
      automountServiceAccountToken: false
      enableServiceLinks: false
      terminationGracePeriodSeconds: 30
      securityContext:
        runAsNonRoot: true
        runAsUser: 1000
        runAsGroup: 1000
        fsGroup: 1000
        seccompProfile:
          type: RuntimeDefault
      containers:
      - name: ray-worker
        image: {{ .Values.image | toString | quote }}
        imagePullPolicy: {{ .Values.pullPolicy | toString | quote }}
        command:
        - tini
        - "--"
        - "/bin/bash"
        - "-c"
        args:
        - "ulimit -n 65536; eval exec \"$KUBERAY_GEN_RAY_START_CMD\""
        env:
        - name: HOME
          value: "/tmp"
        - name: RAY_USAGE_STATS_ENABLED
          value: "0"
        - name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S
          value: "5"
        {{- if .Values.autoscale }}
        - name: ALCHEMIST_GROWS_TO
          value: "{{ int .Values.workers }}x{{ int .Values.cpus }}"
        {{- end }}
        ports:
        - name: metrics
          containerPort: 8080
        resources:
          requests:
            cpu: {{ int .Values.cpus | toString | quote }}
            memory: {{ .Values.memory | toString | quote }}
            ephemeral-storage: {{ .Values.storage | toString | quote }}
            {{- if .Values.rdmaResource }}
            {{ .Values.rdmaResource | toString | quote }}: "1"
            {{- end }}
            {{- if .Values.gpus }}
            nvidia.com/gpu: {{ int .Values.gpus | toString | quote }}
            {{- end }}
          limits:
            cpu: {{ int .Values.cpus | toString | quote }}
            memory: {{ .Values.memory | toString | quote }}
            ephemeral-storage: {{ .Values.storage | toString | quote }}
            {{- if .Values.rdmaResource }}
            {{ .Values.rdmaResource | toString | quote }}: "1"
            {{- end }}
            {{- if .Values.gpus }}
            nvidia.com/gpu: {{ int .Values.gpus | toString | quote }}
            {{- end }}
        startupProbe:
          httpGet:
            path: "/api/healthz"
            port: 52365
          periodSeconds: 5
          timeoutSeconds: 5
          failureThreshold: 60
        readinessProbe:
          httpGet:
            path: "/api/healthz"
            port: 52365
          periodSeconds: 5
          timeoutSeconds: 5
          failureThreshold: 10
        livenessProbe:
          httpGet:
            path: "/api/healthz"
            port: 52365
          periodSeconds: 10
          timeoutSeconds: 5
          failureThreshold: 30
        lifecycle:
          preStop:
            exec:
              command:
              - "/bin/bash"
              - "-c"
              - "kill -TERM 1; sleep 1; for pid in /tmp/alchemist-*/pid; do [ -f \"$pid\" ] && kill -TERM \"$(<\"$pid\")\"; done; sleep 1"
        securityContext:
          allowPrivilegeEscalation: false
          readOnlyRootFilesystem: true
          capabilities:
            drop:
            - ALL
            {{- if .Values.rdmaResource }}
            add:
            - IPC_LOCK
            {{- end }}
        volumeMounts:
        - name: tmp
          mountPath: "/tmp"
        {{- with .Values.volumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      volumes:
      - name: tmp
        emptyDir:
          sizeLimit: {{ .Values.storage | toString | quote }}
      {{- with .Values.volumes }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
      affinity:
        podAffinity:
          preferredDuringSchedulingIgnoredDuringExecution:
          - weight: 100
            podAffinityTerm:
              labelSelector:
                matchLabels:
                  app.kubernetes.io/part-of: alchemist-on-ray
                  app.kubernetes.io/instance: {{ .Release.Name | toString | quote }}
                  app.kubernetes.io/component: worker
              topologyKey: topology.kubernetes.io/zone
        {{- if or .Values.hostNetwork (eq .Values.spread "required") }}
        podAntiAffinity:
          requiredDuringSchedulingIgnoredDuringExecution:
          - labelSelector:
              matchLabels:
                app.kubernetes.io/part-of: alchemist-on-ray
                app.kubernetes.io/instance: {{ .Release.Name | toString | quote }}
                app.kubernetes.io/component: worker
            topologyKey: kubernetes.io/hostname
        {{- else if eq .Values.spread "preferred" }}
        podAntiAffinity:
          preferredDuringSchedulingIgnoredDuringExecution:
          - weight: 50
            podAffinityTerm:
              labelSelector:
                matchLabels:
                  app.kubernetes.io/part-of: alchemist-on-ray
                  app.kubernetes.io/instance: {{ .Release.Name | toString | quote }}
                  app.kubernetes.io/component: worker
              topologyKey: kubernetes.io/hostname
        {{- end }}
      {{- if .Values.hostNetwork }}
      hostNetwork: true
      dnsPolicy: ClusterFirstWithHostNet
      {{- end }}
{{- end }}
