"""Loading a tokenizer and making sure that it can pad and end a sequence."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
_PAD = "<|pad|>"


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> tuple[PreTrainedTokenizerBase, list[str]]:
    """A tokenizer with an EOS token and a pad token that is not EOS.

    A reward model in Hugging Face's format finds the last token of a row as the last one that is not
    padding, so a pad token that equals EOS would hide the EOS. Where the tokenizer has no other, one of
    its unused special tokens becomes the pad token, or a new one is added.

    Returns:
        (tokenizer, notes about what was changed).

    Raises:
        ModelError: there is no tokenizer at `path`, it cannot be read, or it has no EOS token.
    """
    from transformers import AutoTokenizer

    folder = Path(path)
    if folder.is_dir() and not any((folder / name).exists() for name in _TOKENIZER_FILES):
        raise ModelError(
            f"{path}: holds no tokenizer (looked for {', '.join(_TOKENIZER_FILES)}); "
            "copy the model's tokenizer there or name one with model.tokenizer"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:
        if not folder.exists():
            raise unreachable(path, error) from error
        raise ModelError(f"{path}: its tokenizer cannot be loaded ({reason(error)}); check model.tokenizer") from error
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"{path}: the tokenizer has no end-of-sequence token, so no completion could end; "
            "set eos_token in its tokenizer_config.json"
        )
    return tokenizer, _ensure_pad(tokenizer, path)


def _ensure_pad(tokenizer: PreTrainedTokenizerBase, path: str) -> list[str]:
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id != tokenizer.eos_token_id:
        return []
    was = "has no pad token" if tokenizer.pad_token_id is None else "pads with its end-of-sequence token"
    # A special token that ends no reply and starts no prompt; the unknown token comes first where there is one.
    taken = {tokenizer.eos_token, tokenizer.bos_token}
    candidates = [tokenizer.unk_token, *tokenizer.all_special_tokens, *_reserved(tokenizer)]
    unused = [token for token in candidates if token is not None and token not in taken]
    if unused:
        tokenizer.pad_token = unused[0]
        return [f"{path}: the tokenizer {was}; padding with its {unused[0]!r}"]
    tokenizer.add_special_tokens({"pad_token": _PAD})
    return [f"{path}: the tokenizer {was}; added {_PAD!r} (id {tokenizer.pad_token_id})"]


def _reserved(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Added tokens that the vocabulary reserves (<|reserved_special_token_0|>, <reserved_3>, ...)."""
    return [token for token in tokenizer.get_added_vocab() if "reserved" in token]


def unreachable(path: str, error: BaseException) -> ModelError:
    """What to say of a name that is no folder and that no hub gave."""
    return ModelError(
        f"{path}: no such folder, and no hub gave a model of this name ({reason(error)}); check the name or the network"
    )


def reason(error: BaseException) -> str:
    """The first line of an error of a library, without its advice."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
