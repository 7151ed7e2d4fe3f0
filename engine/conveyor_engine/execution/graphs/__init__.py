"""Runs steps on a GPU as one CUDA graph instead of hundreds of kernel launches. Start reading at `step_graphs`."""
