"""Rows of text in, batches of tokens out: sources, stage splits, tokenization, collation.

`rlhf.data.load_sources` reads the sources; `rlhf.data.stage_dataset.load_stage` is the one entry that the stages
call, and
`check_stage` beside it what is asked before; `rlhf.data.cache` keeps what it gives, tokenized once, for all ranks and
the next run; `rlhf.data.batches` turns examples into tensors. This package imports neither torch nor datasets until a
function needs them.
"""

from rlhf.data.records import Message, Row

__all__ = ["Message", "Row"]
