"""The names of models at the gateway's root, which namespaces claim permanently (docs/adr/0055).

`inferenceservice` writes the state of a service's name into the status.
"""
