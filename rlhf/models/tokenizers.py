"""Load a tokenizer and make sure that it can pad and end a sequence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.config.paths import is_path, missing_path_hint
from rlhf.errors import ModelError
from rlhf.models.hub import load_error
from rlhf.roles.model_identity import check_model_files
from rlhf.utils.manifest import hash_json

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
_PAD = "<|pad|>"
_PADDING = re.compile(r"(?<![a-z])pad(?![a-z])|padding", re.IGNORECASE)
_RESERVED = re.compile(r"reserved|unused|placeholder", re.IGNORECASE)
_MEDIA = re.compile(r"image|vision|video|audio", re.IGNORECASE)
_STRANGE = "\u0378 \u2603 \ua9c5 \U000f0000"
"""Characters that have tokens only in a tokenizer that can encode every text (by bytes)."""


def load_tokenizer(
    path: str, *, trust_remote_code: bool = False, eos_token: str | None = None
) -> tuple[PreTrainedTokenizerBase, list[str]]:
    """Load a tokenizer with an EOS token and a pad token that is not EOS.

    A reward model in Hugging Face's format finds the last token of a row as the last one that is not
    padding, so a pad token that equals EOS would hide the EOS. If the tokenizer has no other, a token
    that no text contains becomes the pad token, or a new one is added.

    The text `eos_token` becomes the EOS token, and is added if the tokenizer does not have it.

    Returns:
        (tokenizer, notes about what was changed).

    Raises:
        ModelError: there is no tokenizer at `path`, it cannot be read, or it has no EOS token.
    """
    from transformers import AutoTokenizer

    folder = Path(path)
    if is_path(path) and not folder.exists():
        raise ModelError(f"{path}: no such tokenizer folder; check model.tokenizer{missing_path_hint(path)}")
    if folder.is_dir() and not any((folder / name).exists() for name in _TOKENIZER_FILES):
        raise ModelError(
            f"{path}: holds no tokenizer (looked for {', '.join(_TOKENIZER_FILES)}); "
            "copy the model's tokenizer there or name one with model.tokenizer"
        )
    check_model_files(path, whole=False)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise load_error(path, "its tokenizer cannot be loaded", error, "check its files, or name another") from error
    if not isinstance(tokenizer.model_max_length, int | float):
        raise ModelError(
            f"{path}: model_max_length is {tokenizer.model_max_length!r}, not a number; correct tokenizer_config.json"
        )
    if tokenizer.is_fast:  # its file keeps how the last call before saving truncated and padded; each call sets both
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
    before = tokenizer.eos_token_id
    notes = _end_with(tokenizer, eos_token, path) if eos_token else []
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"{path}: the tokenizer has no end-of-sequence token, so no completion could end; "
            "name one, or a new one, in model.eos_token, e.g. '</s>'"
        )
    return tokenizer, notes + _ensure_pad(tokenizer, path, {before, tokenizer.eos_token_id})


def digest_vocabulary(tokenizer: Any) -> str:
    """Return a digest of a tokenizer's tokens and their numbers."""
    return hash_json(tokenizer.get_vocab())


def find_end_tokens(tokenizer: Any, settings: GenerationConfig | None) -> list[int]:
    """Return ids that end a reply: the tokenizer's EOS, and those of the model's generation settings.

    Of the settings only special and added tokens count, since a configuration may belong to another tokenizer: Llama's
    default end-of-sequence id, 2, is `#` in GPT-2's vocabulary, and every reply would be cut there.

    Raises:
        ModelError: the settings' ids are no numbers.
    """
    named = getattr(settings, "eos_token_id", None)
    ids = named if isinstance(named, list) else [named]
    if not all(token is None or isinstance(token, int) for token in ids):
        raise ModelError(
            f"{tokenizer.name_or_path}: the model's eos_token_id is {named!r}, not a token's id or a list of them; "
            "correct generation_config.json"
        )
    control = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    return sorted({tokenizer.eos_token_id, *(token for token in ids if token in control)})


def _end_with(tokenizer: PreTrainedTokenizerBase, token: str, path: str) -> list[str]:
    if tokenizer.eos_token == token:
        return []
    was = f"ends with {tokenizer.eos_token!r}" if tokenizer.eos_token else "has no end-of-sequence token"
    new = token not in tokenizer.get_vocab()
    tokenizer.add_special_tokens({"eos_token": token})
    what = f"added {token!r} (id {tokenizer.eos_token_id}), to be learned" if new else f"ending with {token!r}"
    return [f"{path}: the tokenizer {was}; {what}"]


def _ensure_pad(tokenizer: PreTrainedTokenizerBase, path: str, ends: set[int | None]) -> list[str]:
    if tokenizer.pad_token_id is None:
        was = "has no pad token"
    elif tokenizer.pad_token_id in ends:
        was = "pads with its end-of-sequence token"
    elif tokenizer.pad_token in str(tokenizer.chat_template or ""):
        was = f"pads with {tokenizer.pad_token!r}, which its chat template writes"
    else:
        return []
    unused = _unused(tokenizer)
    if unused:
        tokenizer.pad_token = unused[0]
        return [f"{path}: the tokenizer {was}; padding with its {unused[0]!r}"]
    tokenizer.add_special_tokens({"pad_token": _PAD})
    return [f"{path}: the tokenizer {was}; added {_PAD!r} (id {tokenizer.pad_token_id})"]


def _unused(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return tokens that no prompt and no reply contains, the best choice for padding first.

    A model does not learn its pad token and sometimes does not see it. So only tokens for padding and unused ones
    qualify (<pad>, <|fim_pad|>, <|finetune_right_pad_id|>, <|reserved_special_token_0|>, <unused3>), and the
    unknown token if every text can be encoded without it. Other special tokens begin turns, or mark images or tools.
    """
    used_tokens = {tokenizer.eos_token, tokenizer.bos_token, tokenizer.unk_token}
    tokens = [
        token
        for token in sorted(tokenizer.get_added_vocab(), key=lambda token: (len(token), token))
        if token not in used_tokens and token not in str(tokenizer.chat_template or "") and not _MEDIA.search(token)
    ]
    ordered = [token for kind in (_PADDING, _RESERVED) for token in tokens if kind.search(token)]
    unknown = tokenizer.unk_token
    free = unknown not in (tokenizer.eos_token, tokenizer.bos_token, None)
    if free and tokenizer.unk_token_id not in tokenizer(_STRANGE, add_special_tokens=False)["input_ids"]:
        ordered.append(unknown)
    return ordered
