"""What an InferenceService is: its models, names, labels and conditions. Pure; imported by operator and gateway.

The models are the one source of the CRD (`python -m conveyor_api generate`) and of the API reference.
`settings` alone is about the processes: how operator, gateway and metrics server read their flags and variables.
"""
