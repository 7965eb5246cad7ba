"""Helpers that tests of several folders call: tiny models, and comparing saved weights."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WORDS = ("red", "blue", "green", "cow", "dog", "owl", "moo", "woof", "hoot", "please", "thanks", "no", "go", "away")

NAMES = [
    "model.path",
    "model.tokenizer",
    "data.datasets.0.path",
    "data.datasets.0.heldout",
    "reward.model",
    "ppo.actor",
    "ppo.reward_model",
]
"""Keys of the settings that name a model or data."""


def mark_slow(cases: Mapping[str, Any], *, except_for: Collection[str]) -> list[Any]:
    """Return the cases of a test by name, marked as slow except for some.

    Raises:
        ValueError: no case has a name of `except_for`.
    """
    import pytest

    if unknown := set(except_for) - cases.keys():
        raise ValueError(f"no cases are named {', '.join(sorted(unknown))}; the names are {', '.join(cases)}")
    return [
        pytest.param(case, id=name, marks=[] if name in except_for else [pytest.mark.slow])
        for name, case in cases.items()
    ]


LAUNCHER = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "RLHF_ACCELERATOR", "DS_ACCELERATOR"}
"""Variables that a process group in this process sets while it exists, as the fixture `accelerator` does."""


def user_environment() -> dict[str, str]:
    """The environment of a user's shell: without what a process group in this process has set."""
    return {name: value for name, value in os.environ.items() if name not in LAUNCHER} | {"RLHF_PLUGINS": "none"}


def build_tokenizer() -> Any:
    from rlhf.data.toy_world import build_tokenizer

    rng = random.Random(0)
    return build_tokenizer((" ".join(rng.choices(WORDS, k=6)) for _ in range(200)), vocab_size=300)


def emulate_bf16(accelerator: Any) -> None:
    """Have the CPU's backend give bf16 where it is asked for by name, on a processor without bf16 instructions too.

    Torch emulates it: slower, and with the same rounding.
    """
    import torch

    from accelerators import Precision
    from accelerators.backends.cpu import info as cpu_info

    refused = accelerator.precision
    if not cpu_info.native_bf16():
        emulated = Precision(torch.bfloat16, "bf16", "emulated, for a test")
        accelerator.precision = lambda wish="auto": emulated if wish == "bf16" else refused(wish)


def llama(vocabulary: int, *, seed: int = 0, **changes: Any) -> Any:
    """A Llama with random weights, small enough for a step of a few milliseconds."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
        "bos_token_id": None,
        "pad_token_id": 0,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **(sizes | changes)))


def weights(folder: Path) -> dict[str, Any]:
    """The tensors of a saved model."""
    from safetensors.torch import load_file

    tensors: dict[str, Any] = load_file(folder / "model.safetensors")
    return tensors


def assert_same_weights(actual: Path, expected: Path, *, atol: float = 0.0) -> None:
    """Compare two folders of saved models."""
    assert_close_weights(weights(actual), weights(expected), atol=atol)


def assert_close_weights(actual: dict[str, Any], expected: dict[str, Any], *, atol: float = 2e-5) -> None:
    import torch

    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        difference = (tensor.float() - expected[name].float()).abs().max().item()
        assert difference <= atol, f"{name} differs by {difference}"
        assert torch.isfinite(tensor).all()


def sets(*keys: str) -> list[str]:
    """Return the options that set each of `keys`, "ppo.steps=3" for example."""
    return [part for key in keys for part in ("--set", key)]


def models_of(run: Path) -> tuple[str, str]:
    """Return the keys by which PPO starts from the SFT model and the reward model of another run."""
    return f"ppo.actor={run / 'sft' / 'model'}", f"ppo.reward_model={run / 'reward' / 'model'}"


def start(rlhf: Any, *arguments: object, **options: Any) -> subprocess.Popen[str]:
    """Start the command line with the tiny recipe of the fixture `rlhf`, in a separate session, and do not wait.

    `options` are those of `subprocess.Popen`; output goes to pipes unless they set something else.
    """
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True} | options
    command = [sys.executable, "-m", "rlhf", *map(str, arguments), "--config", str(rlhf.recipe)]
    return subprocess.Popen(
        command,
        text=True,
        env=user_environment(),
        **options,
    )


def wait_for(path: Path, process: Any, seconds: float = 240) -> None:
    """Wait until a process, of subprocess or of tests/forks.py, has made `path`."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)


def kill_at(path: Path, rlhf: Any, *arguments: object) -> None:
    """Start the command line with the tiny recipe, in a fork, and kill it as soon as it has made `path`."""
    process = rlhf.forks.start("-m", "rlhf", *map(str, arguments), "--config", str(rlhf.recipe))
    wait_for(path, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@contextmanager
def small_disk(folder: Path, *, mebibytes: int) -> Iterator[Path]:
    """Mount a file system of this size at `folder`; skip the test if that is not allowed."""
    import pytest

    if os.geteuid():
        pytest.skip("needs root, to mount a file system")
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(folder)]
    if (done := subprocess.run(command, capture_output=True, text=True)).returncode:
        pytest.skip(f"cannot mount a file system: {done.stderr}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
