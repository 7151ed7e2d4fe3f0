"""Norms, rotary embeddings and activations with torch's own operations, on any device."""

import torch
from torch.nn import functional


class TorchElementwise:
    """See `elementwise.Elementwise`."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
        if not offset:
            return functional.rms_norm(x, weight.shape, weight, eps)
        # offset + weight would lose the weight's last bits in x's type
        return functional.rms_norm(x.float(), weight.shape, offset + weight.float(), eps).to(x.dtype)

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        cos, sin = cos.transpose(0, 1), sin.transpose(0, 1)  # (T, 1, R): the same for all heads
        rotary = cos.shape[-1]
        part = x if rotary == x.shape[-1] else x[..., :rotary]
        first, second = part.chunk(2, dim=-1)
        rotated = torch.addcmul(part * cos, torch.cat((-second, first), dim=-1), sin)
        return rotated if part is x else torch.cat((rotated, x[..., rotary:]), dim=-1)

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return functional.silu(gate) * up
