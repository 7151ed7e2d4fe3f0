"""One thread, as for the engine's tests: OpenMP's regions cost more than they give on tiny models."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
