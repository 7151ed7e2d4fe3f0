"""Makes a real Kubernetes on this machine for development, tests and the demo, and removes it completely.

There are two sizes. `control_plane.ControlPlane` has the API server and controllers, but no pods; it starts in seconds.
`python -m e2e.cluster up` makes a whole cluster, with one of two providers: `local` (plain processes) or `kind`. This
package knows nothing of Conveyor; it returns a kubeconfig.
"""
