"""Raw text for PPO's pre-training loss (`ppo.ptx_coef`): documents become rows of one length, without padding.

The sources of `data.pretraining` and a tokenizer go in; `Packed` rows of token ids come out. The documents of all
sources are put in an order drawn from the seed, each ended by the end token, and written one after the other; the whole
is cut every `length` tokens, as GPT's were (arXiv:2005.14165, appendix B): a row may hold the end of one document and
the beginning of another, which then sees it. What is lost is the rest of less than a row after the last.
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

_AT_ONCE = 1000  # documents tokenized in one call


class PackedTokens(Sequence[list[int]]):
    """Rows of `length` tokens, cut from one long text of `tokens`."""

    def __init__(self, tokens: array[int], length: int) -> None:
        self._tokens, self.length = tokens, length

    def __len__(self) -> int:
        return len(self._tokens) // self.length

    def __getitem__(self, place: Any) -> Any:
        if not 0 <= place < len(self):
            raise IndexError(place)
        return self._tokens[place * self.length : (place + 1) * self.length].tolist()

    @property
    def tokens(self) -> int:
        """Tokens of the documents, those that are lost with the last of them included."""
        return len(self._tokens)


def check_pretraining(config: Config, ranks: int) -> None:
    """Find out whether PPO's settings and sources of raw text fit together; opens nothing.

    Raises:
        ConfigError: there is a weight without sources or the reverse, or the rows cannot be divided over `ranks`.
        DataError: a source is not there.
    """
    given, wanted = bool(config.data.pretraining), config.ppo.ptx_coef > 0
    if wanted and not given:
        raise ConfigError("ppo.ptx_coef: there is no text to learn from; name some in data.pretraining, or set it to 0")
    if given and not wanted:
        raise ConfigError("data.pretraining: nothing learns from it; set ppo.ptx_coef, or leave it out")
    for source in config.data.pretraining:
        readers.check_source_exists(source.path, "data.pretraining")
    if wanted:
        config.ppo.pretraining(ranks)


def row_length(config: Config) -> int:
    """Tokens of one row."""
    return config.ppo.ptx_length or config.data.max_length


def read_documents(config: Config, *, show: bool = False) -> list[str]:
    """The documents of all sources, in their order.

    Raises:
        DataError: a source cannot be read, or has no text in the column that is named.
    """
    return [text for source in config.data.pretraining for text in _texts(source, config.seed, show)]


def fingerprint_documents(documents: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What `run.json` holds of the documents, so that a run does not go on with others; empty where there are none."""
    digest = hashlib.blake2b(digest_size=16)
    for text in documents:
        digest.update(f"{len(text)} {text}\n".encode())
    found = {"rows": len(documents), "dropped": 0, "digest": digest.hexdigest()}
    return {"data.pretraining": found} if documents else {}


def pack_documents(
    config: Config, documents: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, most: int | None = None
) -> PackedTokens:
    """The documents as rows of `ppo.ptx_length` tokens; of their beginning alone where `most` rows are enough.

    Raises:
        DataError: they are too few for one update, which has `ppo.ptx_batch_size` different rows.
    """
    length, batch = row_length(config), config.ppo.pretraining_rows
    order = random.Random(f"pretraining {config.seed}").sample(documents, len(documents))
    tokens = array("i")
    for ids in _encoded(order, tokenizer):
        tokens.extend(ids)
        if most is not None and len(tokens) >= most * length:
            break
    packed = PackedTokens(tokens, length)
    if len(packed) < batch:
        raise DataError(
            f"data.pretraining: its {packed.tokens:,} tokens make {len(packed)} rows of {length} (ppo.ptx_length), and "
            f"an update takes {batch} (ppo.ptx_batch_size); add text, or lower these"
        )
    return packed


def _encoded(documents: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    for start in range(0, len(documents), _AT_ONCE):
        yield from encode_documents(tokenizer, documents[start : start + _AT_ONCE])


def _texts(source: PretrainingConfig, seed: int, show: bool) -> list[str]:
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
    found = {name for record in values for name in record}
    if source.text not in found:
        listed = ", ".join(sorted(found)) or "none"
        raise DataError(f"{source.path}: no column {source.text!r} (data.pretraining.*.text); found: {listed}")
    texts = [text for record in values if isinstance(text := record.get(source.text), str) and text.strip()]
    if not texts:
        raise DataError(
            f"{source.path}: its column {source.text!r} holds no text; name another in data.pretraining.*.text"
        )
    return texts
