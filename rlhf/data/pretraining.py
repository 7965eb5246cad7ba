"""Raw text for PPO's pretraining loss (`ppo.ptx_coef`): documents packed into rows of one length, without padding.

`pack_documents` takes the sources of `data.pretraining` and a tokenizer, and returns `PackedTokens`. The documents of
all sources are shuffled by the seed, each ends with the end token, and their concatenation is cut every `length`
tokens, as for GPT-3 (arXiv:2005.14165, appendix B): a row may contain the end of one document and the beginning of the
next, which then attends to it. The last tokens, fewer than one row, are dropped.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from rlhf.config.data import PretrainingConfig
from rlhf.config.schema import Config
from rlhf.data import readers
from rlhf.data.prompt_encoding import encode_documents
from rlhf.errors import ConfigError, DataError
from rlhf.reporting.console import console

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BATCH = 1000  # documents tokenized in one call


class PackedTokens(Sequence[list[int]]):
    """Rows of `length` tokens, cut from one long sequence of `tokens`."""

    def __init__(self, tokens: array[int], length: int) -> None:
        self._tokens, self.length = tokens, length

    def __len__(self) -> int:
        return len(self._tokens) // self.length

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._tokens[index * self.length : (index + 1) * self.length].tolist()

    @property
    def tokens(self) -> int:
        """Number of tokens of the documents, the dropped ones included."""
        return len(self._tokens)


def check_pretraining(config: Config) -> None:
    """Check that PPO's settings and the sources of raw text fit together; no source is opened.

    Raises:
        ConfigError: there is a weight without sources or the reverse.
        DataError: a source does not exist.
    """
    has_sources, has_loss = bool(config.data.pretraining), config.ppo.ptx_coef > 0
    if has_loss and not has_sources:
        raise ConfigError("ppo.ptx_coef: there is no text to train on; name some in data.pretraining, or set it to 0")
    if has_sources and not has_loss:
        raise ConfigError("data.pretraining: no loss uses it; set ppo.ptx_coef, or remove data.pretraining")
    for source in config.data.pretraining:
        readers.check_source_exists(source.path, "data.pretraining")


def row_length(config: Config) -> int:
    """Return the number of tokens of one row."""
    return config.ppo.ptx_length or config.data.max_length


def read_documents(config: Config, *, show: bool = False) -> list[str]:
    """Return the documents of all sources, in order.

    Raises:
        DataError: a source cannot be read, or has no text in the named column.
    """
    return [text for source in config.data.pretraining for text in _read_texts(source, config.data_seed, show)]


def fingerprint_documents(documents: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the entry of `run.json` that keeps a resumed run from using other documents; empty if there are none."""
    digest = hashlib.blake2b(digest_size=16)
    for text in documents:
        digest.update(f"{len(text)} {text}\n".encode())
    entry = {"rows": len(documents), "dropped": 0, "digest": digest.hexdigest()}
    return {"data.pretraining": entry} if documents else {}


def pack_documents(
    config: Config, documents: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, max_rows: int | None = None
) -> PackedTokens:
    """Pack the documents into rows of `ppo.ptx_length` tokens; tokenization stops after `max_rows`, if given.

    Raises:
        DataError: there are too few tokens for one update, which has `ppo.ptx_batch_size` different rows.
    """
    length, batch = row_length(config), config.ppo.pretraining_rows
    order = random.Random(f"pretraining {config.seed}").sample(documents, len(documents))
    tokens = array("i")
    for ids in _encode(order, tokenizer):
        tokens.extend(ids)
        if max_rows is not None and len(tokens) >= max_rows * length:
            break
    packed = PackedTokens(tokens, length)
    if len(packed) < batch:
        raise DataError(
            f"data.pretraining: {packed.tokens:,} tokens make {len(packed)} rows of {length} (ppo.ptx_length), but an "
            f"update needs {batch} (ppo.ptx_batch_size); add text, or lower these settings"
        )
    return packed


def _encode(documents: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    for start in range(0, len(documents), _BATCH):
        yield from encode_documents(tokenizer, documents[start : start + _BATCH])


def _read_texts(source: PretrainingConfig, seed: int, show: bool) -> list[str]:
    with console.status(f"reading {source.path}") if show else nullcontext():
        records = readers.read_records(
            source.path,
            split=source.split,
            subset=source.subset,
            revision=source.revision,
            limit=source.limit,
            seed=seed,
        )
    values = [record.values for record in records if record.values is not None]
    present = {name for record in values for name in record}
    if source.text not in present:
        listed = ", ".join(sorted(present)) or "none"
        raise DataError(f"{source.path}: no column {source.text!r} (data.pretraining.*.text); found: {listed}")
    texts = [text for record in values if isinstance(text := record.get(source.text), str) and text.strip()]
    if not texts:
        raise DataError(f"{source.path}: column {source.text!r} has no text; name another in data.pretraining.*.text")
    return texts
