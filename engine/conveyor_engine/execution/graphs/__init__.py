"""Steps that a GPU is given as one CUDA graph, in place of hundreds of launches. `step_graphs` is where to begin."""
