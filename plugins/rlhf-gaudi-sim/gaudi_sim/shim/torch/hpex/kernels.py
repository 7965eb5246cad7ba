"""FusedSDPA: attention as Gaudi's kernel takes it."""

import torch


class FusedSDPA:
    """PyTorch's attention behind the kernel's positional arguments."""

    @staticmethod
    def apply(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        /,
    ) -> torch.Tensor:
        """Attend: query [B, H, T, D], key and value [B, G, S, D], mask to add [B, 1 or H, T, S] -> [B, H, T, D]."""
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
