"""Describes a compiled kernel. Without Triton, so that tests that use its interpreter can import this."""

from dataclasses import dataclass, field

CAPABILITIES = (80, 90, 100)
SMALL_CAPABILITIES = (86, 89, 120)  # their blocks have less shared memory
OTHER_ROWS = (7, 31, 150)  # of products in few bits, whose kernels those for 16, 32 and 64 rows are
OTHER_TOKENS = (3, 8, 700)  # of experts in few bits, whose kernels those for 1 and 1,024 tokens are
FEW_LAYERS = ("Qwen3-8B", "MiniCPM3")  # they launch every kernel


@dataclass(frozen=True)
class Compiled:
    """One kernel for one GPU, at its first launch."""

    name: str
    layer: str
    step: str
    capability: int
    num_warps: int
    num_stages: int
    registers: int  # per thread
    stack_bytes: int  # per thread: memory for spilled registers
    shared_bytes: int  # per block
    ptx: str = field(repr=False)

    def __str__(self) -> str:
        return (
            f"sm_{self.capability:<4} {self.name:<20} {self.layer:<13} {self.step:<26} {self.num_warps:>5} "
            f"{self.num_stages:>6} {self.registers:>9} {self.stack_bytes:>5} {self.shared_bytes:>6}"
        )


HEADER = f"{'part':<7} {'kernel':<20} {'layer':<13} {'step':<26} warps stages registers stack shared"
