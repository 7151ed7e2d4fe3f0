"""The task that runs users' own models in one step. A model is a program of torch.export or a Python class."""
