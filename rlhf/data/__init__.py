"""From rows of text to batches of tokens: sources, stage splits, tokenization, collation.

`rlhf.data.load_sources` reads the sources. `rlhf.data.stage_dataset` has `load_stage`, which the stages call, and
`check_stage`, which preflight calls. `rlhf.data.cache` stores tokenized examples for all ranks and for later runs.
`rlhf.data.batches` turns examples into tensors. Apart from it, no module imports torch or datasets before a function
needs them.
"""

from rlhf.data.records import Message, Row

__all__ = ["Message", "Row"]
