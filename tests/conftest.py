"""What many tests share: a tiny model, tiny data, and the accelerator in a process group of one."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from accelerators.backends.cpu import info as cpu_info
from tests.forks import Forks
from tests.helpers import WORDS, build_tokenizer, emulate_bf16, llama, user_environment

if TYPE_CHECKING:
    from accelerators import Accelerator

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell's job in the background; what it starts inherits that
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # one test process a core
# Tests run on the CPU, and where there is a GPU, it would be chosen. For tests that need one, it is set before.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")


LONG = {"accelerators", "engine", "families", "matrix", "optimum", "preflight", "recipes", "reference", "trainers"}
"""Folders whose files take longest. They come first, so that no worker is left alone with one of them in the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if missing := [folder for folder in sorted(LONG) if not Path(__file__).with_name(folder).is_dir()]:
        raise pytest.UsageError(f"LONG of tests/conftest.py: no such folder, got {', '.join(missing)}; rename it there")
    items.sort(key=lambda item: item.path.parent.name not in LONG)


def _skip_if_bf16_is_refused() -> Generator[None, object, object]:
    """Skip a test that asks for bf16, itself or in a process that it starts, on a processor without bf16."""
    try:
        return (yield)
    except (Exception, SystemExit) as error:
        if not cpu_info.native_bf16() and "this processor has no native bf16" in str(error):
            pytest.skip("this processor has no native bf16, and the CPU's backend refuses it")
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, object, object]:
    return (yield from _skip_if_bf16_is_refused())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    return (yield from _skip_if_bf16_is_refused())


@pytest.fixture(scope="module", autouse=True)
def frozen_modules() -> None:
    """What is imported already is left out of later garbage collections, which take half a second with it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def plain_linear() -> Iterator[None]:
    """Undo DeepSpeed's replacement of the linear function at ZeRO-3, which would slow down all later tests."""
    yield
    if "torch" in sys.modules:
        import torch

        torch.nn.functional.linear = torch._C._nn.linear


@pytest.fixture(scope="session", autouse=True)
def datasets_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Data sets and tokenized rows are kept in a folder of the tests, and not in the user's."""
    os.environ["HF_DATASETS_CACHE"] = str(tmp_path_factory.mktemp("datasets"))


@pytest.fixture(scope="session")
def accelerator() -> Iterator[Accelerator]:
    """The CPU backend, bound, with DeepSpeed prepared and a process group of one."""
    import accelerators
    from rlhf.engine import distributed

    selection = accelerators.select("cpu", environ={})
    with distributed.start_process_group(selection) as bound:
        emulate_bf16(bound)
        yield bound


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return build_tokenizer()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A causal language model with its tokenizer, as save_pretrained leaves them."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    llama(len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def data_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 rows of prompt/response/chosen/rejected, of very different lengths."""
    rng = random.Random(1)

    def words(low: int, high: int) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(low, high)))

    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    rows = [
        {
            "prompt": f"{words(1, 8)} {number}",
            "response": words(1, 8),
            "chosen": f"please {words(1, 6)}",
            "rejected": f"go away {words(1, 6)}",
        }
        for number in range(200)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def recipe(model_folder: Path, data_file: Path) -> dict[str, Any]:
    """A run of every stage in a few steps each, in fp32 and static shapes; AdamW needs no warm-up here."""
    optimizer = {"learning_rate": 1e-3, "warmup": 0}
    return {
        "precision": "fp32",
        "model": {"path": str(model_folder)},
        "engine": {"zero_stage": 1, "zero_persistence_threshold": 0, "shapes": "static"},
        "data": {
            "datasets": [{"path": str(data_file)}],
            "max_prompt_length": 24,
            "max_completion_length": 16,
            "heldout_fraction": 0.2,
        },
        "sft": {"batch_size": 4, "max_steps": 3, "eval_rows": 8, "optimizer": optimizer},
        "reward": {"batch_size": 4, "max_steps": 3, "eval_rows": 8, "optimizer": optimizer},
        "dpo": {"batch_size": 4, "max_steps": 3, "eval_rows": 8, "optimizer": optimizer},
        "ppo": {
            "batch_size": 4,
            "minibatch_size": 2,
            "ppo_epochs": 2,
            "steps": 3,
            "eval_rows": 6,
            "optimizer": optimizer,
            "critic_optimizer": optimizer,
        },
        "distill": {"batch_size": 4, "max_steps": 3, "eval_rows": 6, "optimizer": optimizer},
    }


KEYS = {"HF_TOKEN": "hf_Planted0", "WANDB_API_KEY": "wandbPlanted1", "AWS_SECRET_ACCESS_KEY": "awsPlanted2"}
"""Secrets in the environment of all runs, which must not reach their files and output."""

Rlhf = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    forks = Forks(user_environment() | {"DS_ACCELERATOR": "cpu"} | KEYS)
    yield forks
    forks.close()


@pytest.fixture(scope="session")
def rlhf(recipe: dict[str, Any], forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Rlhf:
    """Run the command line as a user would: rlhf("sft", "--output", path) with the tiny recipe, or another, or none."""
    tiny = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    tiny.write_text(json.dumps(recipe), encoding="utf-8")

    def run(
        *arguments: object, check: bool = True, timeout: float = 300, recipe: Path | None = tiny
    ) -> subprocess.CompletedProcess[str]:
        named = ["--config", str(recipe)] if recipe else []
        done = forks.run(*map(str, arguments), *named, timeout=timeout)
        if check:
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done

    run.recipe, run.forks = tiny, forks  # type: ignore[attr-defined]
    return run


@pytest.fixture(scope="session")
def finished_run(rlhf: Rlhf, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a complete run of the tiny recipe."""
    output = tmp_path_factory.mktemp("finished") / "run"
    rlhf("--output", output)
    return output


@pytest.fixture(scope="session")
def finished_dpo(rlhf: Rlhf, finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run whose one stage is DPO, from the SFT model of `finished_run`."""
    output = tmp_path_factory.mktemp("finished-dpo") / "run"
    rlhf("dpo", "--output", output, "--set", f"dpo.model={finished_run / 'sft' / 'model'}")
    return output


@pytest.fixture(scope="session")
def finished_distill(rlhf: Rlhf, finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run whose one stage is distillation, of `finished_run`'s policy into its SFT model."""
    output = tmp_path_factory.mktemp("finished-distill") / "run"
    models = {"model": finished_run / "sft" / "model", "teacher": finished_run / "ppo" / "model"}
    rlhf("distill", "--output", output, *(f"--set=distill.{key}={path}" for key, path in models.items()))
    return output
