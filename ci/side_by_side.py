"""Run one toy job in DeepSpeed-Chat and in rlhf, and print a table with the numbers of both.

python ci/side_by_side.py DIRECTORY [--folder FOLDER] [--result FILE]

DIRECTORY is applications/DeepSpeed-Chat of a checkout of DeepSpeedExamples.

A tiny OPT with random weights and the same rows go through steps 1, 2 and 3 of DeepSpeed-Chat's own main.py, in one
process on the CPU and in fp32, with the substitutions in `PATCHES`. The same arguments go through `rlhf config
--from-deepspeed-chat`, with the settings in `CHANGES`. A batch has all rows, because their order differs. Steps 2 and 3
start from the same files in both: those of DeepSpeed-Chat. Its steps 2 and 3 then run once more, with `CAUSES` as well.
docs/deepspeed-chat-side-by-side.md explains the numbers.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rlhf.contrib.deepspeed_chat.translate import format_translation, translate_commands  # noqa: E402
from rlhf.data.toy_world import generate_records  # noqa: E402

END, PAD, REPLY_END = "</s>", "<pad>", "<|endoftext|>"  # OPT's tokens, and the text that ends replies
TRAIN_ROWS, HELDOUT_ROWS, EPOCHS = 128, 64, 3
MAIN = "training/{}/main.py"
STEPS = {
    "sft": MAIN.format("step1_supervised_finetuning"),
    "reward": MAIN.format("step2_reward_model_finetuning"),
    "ppo": MAIN.format("step3_rlhf_finetuning"),
}
ENGINE, CONFIG = "dschat/rlhf/rlhf_engine.py", "dschat/utils/ds_utils.py"
MODELS, REWARD = "dschat/utils/model/model_utils.py", "dschat/utils/model/reward_model.py"
UTILS = "dschat/utils/utils.py"
ADAM = ("from deepspeed.ops.adam import FusedAdam\n", "from torch.optim import AdamW as FusedAdam\n")
BOTH_ADAMS = (
    "from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam",
    "from torch.optim import AdamW as FusedAdam\nfrom deepspeed.ops.adam import DeepSpeedCPUAdam",
)
BF16 = 'data_type = "bfloat16"\n        dtype_config = '
PATCHES: tuple[tuple[str, str, str], ...] = (
    (STEPS["sft"], *BOTH_ADAMS),
    (STEPS["reward"], *BOTH_ADAMS),
    (ENGINE, *ADAM),
    (CONFIG, f'{BF16}{{"enabled": True}}', f'{BF16}{{"enabled": False}}'),
    (
        MODELS,
        "from transformers.modeling_utils import no_init_weights",
        "from transformers.initialization import no_init_weights",
    ),
    (MODELS, 'from_tf=bool(".ckpt" in model_name_or_path),', ""),
    (UTILS, "tokenizer.save_vocabulary(output_dir)", "tokenizer.save_pretrained(output_dir)"),
    (REWARD, 'self.config.model_type == "llama"', 'self.config.model_type in ("llama", "opt")'),
)
"""A file of DeepSpeed-Chat, the text that is replaced, and its replacement."""

CAUSES: tuple[tuple[str, str, str], ...] = (
    (UTILS, "tokenizer.pad_token = tokenizer.eos_token", f'tokenizer.pad_token = "{PAD}"'),
    (MODELS, "model.config.pad_token_id = model.config.eos_token_id", ""),
    (REWARD, "use_cache=use_cache,", "use_cache=use_cache, position_ids=(attention_mask.cumsum(-1) - 1).clamp_min(0),"),
    (
        UTILS,
        "self.ema = self.alpha * prev_ema + (1.0 - self.alpha) * num",
        "self.count = getattr(self, 'count', 0) + 1; weight = (1 - self.alpha) / (1 - self.alpha**self.count); "
        "self.ema = (1 - weight) * prev_ema + weight * num",
    ),
)
"""Further substitutions, which remove the causes of all differences: pad token, position of padding, moving mean."""


def write_inputs(folder: Path) -> None:
    """Write the model, its tokenizer and the rows into `folder`."""
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import OPTConfig, OPTForCausalLM, PreTrainedTokenizerFast

    records = list(generate_records(0, 4000))
    words = ByteLevelBPETokenizer()
    texts = (text for record in records for text in record.values())
    words.train_from_iterator(texts, 600, special_tokens=["<s>", PAD, END, "<unk>", REPLY_END])
    words.post_processor = TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 2)])
    rows = [
        {"prompt": f"Human: {row['prompt']} Assistant:", "chosen": row["chosen"], "rejected": row["rejected"]}
        for row in records[: TRAIN_ROWS + HELDOUT_ROWS]
    ]
    (folder / "data").mkdir()
    for name, part in (("train", rows[:TRAIN_ROWS]), ("eval", rows[TRAIN_ROWS:])):
        lines = (json.dumps(row) + "\n" for row in part)
        (folder / f"data/{name}.json").write_text("".join(lines), encoding="utf-8")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words._tokenizer, bos_token=END, eos_token=END, pad_token=PAD, unk_token="<unk>"
    )
    config = OPTConfig(
        vocab_size=math.ceil(len(tokenizer) / 8) * 8,
        hidden_size=64,
        word_embed_proj_dim=64,
        ffn_dim=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        dropout=0.0,
        init_std=0.05,
    )
    torch.manual_seed(0)
    OPTForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def copy_originals(directory: Path, folder: Path, patches: Iterable[tuple[str, str, str]]) -> None:
    """Copy DeepSpeed-Chat into `folder`, with `patches` and the rows of the folder above."""
    for part in ("training", "dschat"):
        shutil.copytree(directory / part, folder / part)
    (folder / "data").symlink_to("../data")
    for name, old, new in patches:
        path = folder / name
        text = path.read_text(encoding="utf-8")
        if old not in text:
            raise SystemExit(f"{name}: expected {old!r}; adapt PATCHES and CAUSES to this version")
        path.write_text(text.replace(old, new), encoding="utf-8")


SHARED = (
    f"--data_path local/jsonfile --num_train_epochs {EPOCHS} --seed 1234 --dtype bf16 --lr_scheduler_type constant "
    "--num_warmup_steps 0"
)
TRAINING = (
    f"--model_name_or_path model --per_device_train_batch_size {TRAIN_ROWS} "
    f"--per_device_eval_batch_size {HELDOUT_ROWS} --max_seq_len 96 --learning_rate 1e-3 --weight_decay 0.1 "
    "--dropout 0.0"
)
COMMANDS = {
    "sft": f"{SHARED} {TRAINING} --data_split 1,0,0 --output_dir sft --print_loss",
    "reward": f"{SHARED} {TRAINING} --data_split 0,1,0 --output_dir reward --add_eot_token",
    "ppo": f"{SHARED} --actor_model_name_or_path sft --critic_model_name_or_path reward --data_split 0,0,1 "
    f"--per_device_generation_batch_size {TRAIN_ROWS} --per_device_training_batch_size {TRAIN_ROWS} "
    "--max_prompt_seq_len 64 --max_answer_seq_len 8 --actor_learning_rate 1e-4 --critic_learning_rate 1e-4 "
    "--actor_weight_decay 0.1 --critic_weight_decay 0.1 --actor_dropout 0.0 --critic_dropout 0.0 --output_dir ppo",
}
"""The arguments of each step's main.py; `--dtype bf16` means fp32 with `PATCHES`."""

CHANGES: dict[str, dict[str, Any]] = {
    "sft": {},
    "reward": {"reward.model": "initial"},
    "ppo": {"ppo.sampling.top_k": 1},
}
"""Settings that a translated recipe gets in addition to precision=fp32 and the prompts' template."""


def run_original(step: str, folder: Path, program: Path, *changes: str) -> str:
    """Run a step of the DeepSpeed-Chat in `program`, with `folder` as working directory, and return what it prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment = os.environ | place | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(program)}
    arguments = [*shlex.split(COMMANDS[step]), "--local_rank", "0", "--data_output_path", str(program / "cache")]
    command = [sys.executable, str(program / STEPS[step]), *arguments, *changes]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    (program / f"{step}.log").write_text(done.stdout + done.stderr, encoding="utf-8")
    if done.returncode:
        raise SystemExit(f"{STEPS[step]}: {done.stderr[-3000:]}")
    return done.stdout


def run_rlhf(step: str, folder: Path) -> list[dict[str, float]]:
    """Translate a step's command line, run it, and return the records of its metrics."""
    command = f"deepspeed --num_gpus 1 {STEPS[step]} {COMMANDS[step]}"
    recipe = yaml.safe_load(format_translation(translate_commands([command], {})))
    recipe["data"]["datasets"][0]["template"] = " Human: {prompt} Assistant:"
    path = folder / f"{step}.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    sets = {"precision": "fp32", "output": folder / "run" / step, f"{step}.log_every": 1} | CHANGES[step]
    arguments = [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]
    command_line = [sys.executable, "-m", "rlhf", step, "--config", str(path), "--accelerator", "cpu", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command_line, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"rlhf {step}: {done.stdout[-3000:]}{done.stderr[-3000:]}")
    lines = (folder / "run" / step / step / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


NUMBER = r"(-?[\d.]+(?:e-?\d+)?)"
SCORES = rf"chosen_last_scores[^:]*: {NUMBER}, rejected_last_scores[^:]*: {NUMBER}, acc[^:]*: {NUMBER}"
LOSSES = rf"Actor Loss: {NUMBER} \| Critic Loss: {NUMBER}"
REWARDS = rf"Average reward score: {NUMBER} \| EMA reward score: {NUMBER}"
ROWS: tuple[tuple[str, str, str, int, str], ...] = (
    ("sft", "`ppl`", rf"ppl: {NUMBER}", 0, "heldout_perplexity"),
    ("sft", "`loss`", rf"Rank: 0, loss = {NUMBER}", 0, "loss"),
    ("reward", "`acc`", SCORES, 2, "heldout_accuracy"),
    ("reward", "`chosen_last_scores`", SCORES, 0, "heldout_chosen_score"),
    ("reward", "`rejected_last_scores`", SCORES, 1, "heldout_rejected_score"),
    ("reward", "`loss`", rf"with loss {NUMBER}", 0, "loss"),
    ("ppo", "`Average reward score`", REWARDS, 0, "reward"),
    ("ppo", "`EMA reward score`", REWARDS, 1, "reward_ema"),
    ("ppo", "`Actor Loss`", LOSSES, 0, "policy_loss"),
    ("ppo", "`Critic Loss`", LOSSES, 1, "value_loss"),
)
"""Step, its number's name there, the text that prints it, the number's position in that text, and its key here."""


def read_numbers(printed: str, pattern: str, position: int) -> list[float]:
    """Return the numbers that DeepSpeed-Chat printed, one for each match of `pattern`, in order."""
    return [float(match[position + 1]) for match in re.finditer(pattern, printed)]


def format_table(
    printed: dict[str, str], changed: dict[str, str], records: dict[str, list[dict[str, float]]]
) -> Iterator[str]:
    """Yield a table with a row for each number and moment; `changed` is what DeepSpeed-Chat prints with `CAUSES`."""
    yield "| step | number there | number here | after updates | DeepSpeed-Chat | rlhf | DeepSpeed-Chat, changed |"
    yield "|---|---|---|---|---|---|---|"
    for step, title, pattern, position, key in ROWS:
        here = [(int(record["step"]), record[key]) for record in records[step] if key in record]
        columns = [read_numbers(printed[step], pattern, position), [value for _, value in here]]
        if step in changed:
            columns.append(read_numbers(changed[step], pattern, position))
        if len({len(column) for column in columns}) > 1:
            raise SystemExit(
                f"{step}: {title}, `{key}`: got {' and '.join(str(len(column)) for column in columns)} values"
            )
        for (done, _), *values in zip(here, *columns, strict=True):
            updates = done if key.startswith("heldout") else done - 1
            cells = [list(STEPS).index(step) + 1, title, f"`{key}`", updates, *(f"{value:.4g}" for value in values)]
            yield f"| {' | '.join(map(str, cells))}{' |' * (4 - len(columns))}"


def compare(directory: Path, folder: Path) -> dict[str, Any]:
    """Run all steps of both programs in `folder`, and return the numbers that they print or record, and the table."""
    folder.mkdir(parents=True)
    original, changed = folder / "original", folder / "changed"
    write_inputs(folder)
    copy_originals(directory, original, PATCHES)
    copy_originals(directory, changed, PATCHES + CAUSES)
    # The new head, for rlhf to start from.
    run_original("reward", folder, changed, "--num_train_epochs", "0", "--output_dir", "initial")
    result: dict[str, Any] = {"printed": {}, "changed": {}, "records": {}}
    for step in STEPS:
        opt = [] if step == "sft" else ["--num_padding_at_beginning", "1"]
        result["printed"][step] = keep_numbers(step, run_original(step, folder, original, *opt))
        keys = {"step", *(key for name, *_, key in ROWS if name == step)}
        kept = ({key: record[key] for key in sorted(keys & record.keys())} for record in run_rlhf(step, folder))
        result["records"][step] = [record for record in kept if len(record) > 1]
        if step != "sft":
            none = ["--num_padding_at_beginning", "0", "--output_dir", f"{step}-changed"]
            result["changed"][step] = keep_numbers(step, run_original(step, folder, changed, *none))
    return result | {"table": "\n".join(format_table(**result))}


def keep_numbers(step: str, printed: str) -> str:
    """Return the lines with a number of the table."""
    patterns = [pattern for name, _, pattern, *_ in ROWS if name == step]
    return "\n".join(line for line in printed.splitlines() if any(re.search(pattern, line) for pattern in patterns))


def main() -> None:
    """Compare, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="applications/DeepSpeed-Chat of a checkout")
    parser.add_argument("--folder", type=Path, help="new folder to work in, which is kept: logs, recipes, runs")
    parser.add_argument("--result", type=Path, help="JSON file for the table and the numbers that it is made from")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary) / "work"
        result = compare(options.directory.resolve(), folder.resolve())
    if options.result:
        options.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(result["table"])


if __name__ == "__main__":
    main()
