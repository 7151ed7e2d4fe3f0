"""Makes a real Kubernetes for development, tests and the demo on this machine, and removes it completely.

Two sizes: `control_plane.ControlPlane` (API server and controllers, no pods; seconds) and a whole cluster
(`python -m e2e.cluster up`), by one of two providers: `local` (plain processes) or `kind`.
Nothing here knows what Conveyor is; it hands out a kubeconfig.
"""
