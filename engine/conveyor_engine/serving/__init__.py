"""The API process. It serves HTTP and sends requests to the engine process. Does not import torch."""
