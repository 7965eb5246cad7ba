"""FusedSDPA: attention as Gaudi's kernel takes it."""

from typing import Any

import torch

from gaudi_sim.behaviours import is_simulated

_NAN_ON_EMPTY_ROWS = is_simulated("empty_rows")


class FusedSDPA:
    """PyTorch's attention behind the kernel's positional arguments, in today's order (gaudi-pytorch-bridge, 04ac36fa).

    The real class is an autograd function: `forward` has the names of the arguments, and `apply` takes no names.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        softmax_mode: str = "None",
        recompute_mode: bool | None = None,
        valid_seq_len: torch.Tensor | None = None,
        seq_padding_type: str = "None",
        return_dropout_mask: bool = False,
        return_attn_probs: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        sink: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend: query [B, H, T, D], key and value [B, G, S, D], mask to add [B, 1 or H, T, S] -> [B, H, T, D].

        `sink` [H] are logits of a column without a value.
        """
        if is_causal and attn_mask is not None:
            raise RuntimeError("FusedSDPA: attn_mask must be None if is_causal is set")
        if valid_seq_len is not None or return_dropout_mask or return_attn_probs or window_size != (-1, -1):
            raise NotImplementedError("the simulated FusedSDPA has no valid_seq_len, windows and further results")
        grouped = query.shape[1] != key.shape[1]
        if sink is not None:
            # The backward pass of the real one returns no gradient for sinks (04ac36fa, sdpa_recomp_bwd).
            attn_mask, key, value = _with_sink(sink.detach(), attn_mask, query, key, value, is_causal)
            is_causal = False
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=grouped
        )
        if attn_mask is not None and sink is None and _NAN_ON_EMPTY_ROWS:
            # "fully masked padding rows genuinely produce NaNs", in outputs and gradients (see `behaviours`).
            empty = attn_mask.amax(-1, keepdim=True) <= torch.finfo(attn_mask.dtype).min
            output = output * torch.where(empty, float("nan"), 1.0).to(output.dtype)
        return output

    @classmethod
    def apply(cls, *arguments: Any) -> torch.Tensor:
        """Run `forward`; autograd differentiates it."""
        return cls.forward(None, *arguments)


def _with_sink(
    sink: torch.Tensor,
    mask: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a mask, keys and values with a further column: its score is the sink's logit, and its value 0."""
    rows, heads, tokens, _ = query.shape
    columns = key.shape[2]
    if mask is None:
        mask = torch.zeros(tokens, columns, dtype=query.dtype, device=query.device)
        if is_causal:
            mask = mask.masked_fill(torch.ones_like(mask).tril().logical_not(), torch.finfo(query.dtype).min)
    mask = mask.expand(rows, heads, tokens, columns)
    logits = sink.to(mask.dtype).view(1, heads, 1, 1).expand(rows, heads, tokens, 1)
    column = torch.zeros_like(key[:, :, :1])  # scores of a key of zeros are 0
    return torch.cat([mask, logits], -1), torch.cat([key, column], 2), torch.cat([value, column], 2)
