"""Every place where rlhf works around transformers: replaced buffers, removed attributes, avoided host reads.

Each item names the upstream code, as transformers 5.17 to 5.24 have it, and the issue if there is one.
`tests/models/test_transformers_patches.py` runs transformers without each of them and expects the fault, so that a
release that fixes it is noticed and the patch can be removed. transformers itself is imported only if a patch needs it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rlhf.errors import DependencyError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import Cache

OLDEST, TOO_NEW = (5, 17), (6, 0)  # the releases from OLDEST on, before TOO_NEW, that these patches are written for

STATIC_CACHE_WORKS = frozenset(("ctrl", "falcon_h1", "gpt_neo", "jetmoe", "mpt", "zamba2"))
"""Architectures that compute the right logits with a static cache although `_can_compile_fullgraph` is False.

That flag is about `torch.compile`; the one about static caches is gone
(https://github.com/huggingface/transformers/issues/39744). GPT-Neo needs `GPTNeoLocalAttention`.
"""


def check_version(version: str) -> None:
    """Refuse a transformers whose internals have not been compared with these patches.

    Raises:
        DependencyError: it is older than `OLDEST`, or not before `TOO_NEW`.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or not OLDEST <= (int(match[1]), int(match[2])) < TOO_NEW:
        allowed = f">={OLDEST[0]}.{OLDEST[1]},<{TOO_NEW[0]}"
        raise DependencyError(
            f"transformers: rlhf's patches are written for {allowed}, got {version}; "
            f"install it with: pip install 'transformers{allowed}'"
        )


def forget_key_mapping(model: Any) -> None:
    """Save a model that was loaded with a `key_mapping` under its current names.

    `PreTrainedModel.save_pretrained` would reverse the mapping (`core_model_loading.revert_weight_conversion`,
    https://github.com/huggingface/transformers/pull/42396).
    """
    vars(model).pop("_weight_conversions", None)


def cache_argument(model: nn.Module) -> str:
    """Return the argument of a model's forward pass that takes the cache: `past_key_values` before transformers 5.24.

    5.24 renamed it to `cache` in every model, and accepts the old name with a warning until 5.40.
    """
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def build_causal_mask(config: Any, like: Tensor, attention_mask: Tensor, cache: Cache | None) -> Tensor | None:
    """Return the mask [B, 1, T, S] of a forward pass, without reading a value on the host.

    Given a [B, S] mask, a model calls `masking_utils.create_causal_mask` itself, which reads the values to see if none
    is needed: the host waits for the device, and the operators depend on the data.

    Args:
        like: [B, T, 0], of the model's type and on its device.
    """
    from transformers.masking_utils import create_causal_mask

    mask: Tensor | None = create_causal_mask(config, like, attention_mask, cache, allow_is_causal_skip=False)
    return mask


class GPTNeoLocalAttention:
    """The masks of GPT-Neo's local attention over a static cache; does nothing for other models.

    `GPTNeoSelfAttention` takes its mask from a table, `bias`, by the number of keys, as if the newest key were the last
    one. In a static cache it stands in its token's column, and the columns behind it are empty: a window counted from
    the end would hide what it should show. While tokens are generated, the table is one whose rows belong to the tokens
    of the current step, where the layers look for them.
    """

    def __init__(self, model: nn.Module, length: int) -> None:
        """`length`: columns of the cache."""
        self._layers: list[Any] = [
            module for module in model.modules() if type(module).__name__ == "GPTNeoSelfAttention"
        ]
        self._tables: list[Tensor] = [layer.bias for layer in self._layers]  # [1, 1, positions, positions]
        self._masks = [table[:, :, :length, :length].clone() for table in self._tables]

    @contextmanager
    def replace_tables(self) -> Iterator[None]:
        """Let the layers read the masks of the current step in this block."""
        try:
            for layer, mask in zip(self._layers, self._masks):
                layer.bias = mask
            yield
        finally:
            for layer, table in zip(self._layers, self._tables):
                layer.bias = table

    def set_prompt(self, tokens: int, keys: int) -> None:
        """Set the masks for the first `tokens` columns as the next tokens, of `keys` columns in all."""
        for mask, table in zip(self._masks, self._tables):
            mask[:, :, keys - tokens : keys].copy_(table[:, :, :tokens, : mask.shape[-1]])

    def set_token(self, column: Tensor, keys: int) -> None:
        """Set the masks for `column` [1] among `keys` as the next token, without reading it on the host."""
        for mask, table in zip(self._masks, self._tables):
            width = mask.shape[-1]
            row = table[..., :width].gather(2, column.view(1, 1, 1, 1).expand(1, 1, 1, width))
            mask[:, :, keys - 1 : keys].copy_(row)
