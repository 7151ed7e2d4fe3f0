"""`conveyor run FILE...`: serves the InferenceServices of files on this machine, without a cluster.

The gateway, the engines, the arithmetic of scaling and the texts of conditions are those of a cluster (docs/adr/0142).
This package has what a cluster adds to them: it reads and checks files, runs pods as processes, and shows their state.
"""
