"""Linear layers and embeddings for inference on GPUs: weights stay dense in bf16 or fp32, as matrix units read them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class DenseLinear(nn.Module):
    """A linear layer whose product has the weights' dtype, between activations in fp32."""

    weight: Tensor
    """Empty. Mixers take the dtype and device of their states from it, as they do from an nn.Linear's."""
    bias: Tensor | None

    def __init__(self, dense_weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.dense_weight = dense_weight  # not a buffer, which lm.float() would convert
        self.register_buffer("weight", torch.empty(0, dtype=torch.float32, device=dense_weight.device))
        self.register_buffer("bias", None if bias is None else bias.detach().float())

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x.to(self.dense_weight.dtype), self.dense_weight).float()
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        N, K = self.dense_weight.shape
        return f"{K}, {N}, {self.dense_weight.dtype}"


class DenseEmbedding(nn.Module):
    """An embedding; a tied one shares its weights with the head."""

    def __init__(self, dense_weight: Tensor):
        super().__init__()
        self.dense_weight = dense_weight

    @property
    def num_embeddings(self) -> int:
        return self.dense_weight.shape[0]

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.dense_weight).float()
