"""What an InferenceService is: its models, names, labels and conditions. Pure; imported by operator and gateway.

The models are the one source of the CRD (`python -m conveyor_api generate`) and of the API reference.
`settings`, `kubeconfig` and `log` alone are about the processes: how operator, gateway and metrics server are told
what to do, find their cluster, and log.
"""
