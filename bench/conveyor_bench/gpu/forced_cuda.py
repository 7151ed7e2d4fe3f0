"""A plugin of pytest for the stage `tasks`: engines that a test's own process runs on the CPU run on the GPU instead.

The tests of most tasks name no device, or the CPU. With this plugin, the same tests compare the GPU's results with the
CPU's results of transformers and diffusers. Convolutions use float32 like everything else, so that the tests' bounds
hold. Processes that a test starts are not changed.
"""

import torch

from conveyor_engine.execution import machine


def pytest_configure() -> None:
    """Force the device, before any test builds an engine."""
    torch.backends.cudnn.allow_tf32 = False
    machine.choose_device = lambda device: torch.device("cuda")
