"""Rows of text in, batches of tokens out: sources, stage splits, tokenization, collation.

`rlhf.data.tokenization.load_stage` is the one entry that the stages call; `rlhf.data.batches` turns its
examples into tensors. This package imports neither torch nor datasets until a function needs them.
"""

from rlhf.data.rows import Message, Row

__all__ = ["Message", "Row"]
