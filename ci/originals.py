"""Compare translated recipes with what DeepSpeed-Chat's own scripts start, in every version of its history.

python ci/originals.py GIT_DIRECTORY... [--table FILE]    checkouts, bare ones too, of DeepSpeedExamples and its fork

Each distinct training script runs under bash with a `deepspeed` that only notes its arguments. The main.py of that
version parses them: its own parser, read from its source. The expected values below come from these arguments and from
constants in the originals' sources alone, never from the tables of the translation. The script then goes through
`rlhf config --from-deepspeed-chat`, and every expected key of the loaded recipe is compared. Exit code 1: a difference.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rlhf.config.schema import Config, load_config  # noqa: E402
from rlhf.contrib.deepspeed_chat.translate import format_translation, translate_commands  # noqa: E402
from rlhf.data.load_sources import SourceSpec  # noqa: E402
from rlhf.errors import ConfigError  # noqa: E402

BELOW = "applications/DeepSpeed-Chat/"
STEPS = {
    "step1_supervised_finetuning": "sft",
    "step2_reward_model_finetuning": "reward",
    "step2_dpo_finetuning": "dpo",
    "step3_rlhf_finetuning": "ppo",
}
DEVICES = 8  # of a launcher that is not told
ENVIRONMENT = {
    "HL_DATASET_PATH": "Dahoas/rm-static Dahoas/full-hh-rlhf",
    "HL_ACTOR_MODEL_PATH": "out/actor",
    "HL_CRITIC_MODEL_PATH": "out/critic",
}
"""Variables that the fork's scripts require."""

MODELS = {"HL_ACTOR_MODEL": "out/actor", "HL_CRITIC_MODEL": "out/critic"}  # of the fork's Llama script of step 3
FORK_CASES: list[dict[str, str]] = [
    {},
    {"HL_LORA_DIM": "16", "HL_GBS": "256", "HL_MBS": "2", "HL_SEED": "7", "HL_DROPOUT": "0.05"},
    {
        "HL_ACTOR_ZERO_STAGE": "3",
        "HL_CRITIC_ZERO_STAGE": "3",
        "HL_NUM_NODES": "2",
        "HL_HPZ_ENABLED": "1",
        "HL_HPZ_ENABLED_ACTOR": "1",
        "HL_HPZ_ENABLED_CRITIC": "1",
        "HL_GBS": "128",
        "HL_ACTOR_CP_ACT": "1",
        "HL_ONLY_OPTIMIZE_LORA": "1",
        "HL_RUN_STEPS": "9",
    },
]
"""Variables for the fork's scripts; those that a script does not read are left out."""

STUBS = {
    "deepspeed": 'printf "%s\\0" "$@" >> "$NOTED"; printf "\\n\\0" >> "$NOTED"',
    "mkdir": 'for folder; do case "$folder" in -* | /*) ;; *) /bin/mkdir -p "$folder" ;; esac; done',
    "tee": "cat > /dev/null",
    **dict.fromkeys(("pkill", "sleep", "python", "python3"), "true"),
}
"""The programs of the scripts; these change nothing outside the folder in which they run."""


@dataclass(frozen=True)
class Original:
    """A script in a version of the repository: its path, and the commit in which that version is seen first."""

    repository: Path
    commit: str
    date: str
    path: str
    stage: str

    def read(self, path: str) -> str:
        return git(self.repository, "show", f"{self.commit}:{path}")

    @property
    def step(self) -> str:
        """The folder of the script's main.py."""
        return next(step for step, stage in STEPS.items() if stage == self.stage)

    @property
    def main(self) -> str:
        return f"{BELOW}training/{self.step}/main.py"


@functools.cache
def git(repository: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", repository, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def find_originals(repository: Path) -> Iterator[Original]:
    """The distinct pairs of a script and its step's main.py in the history, oldest first."""
    seen: set[tuple[str, str]] = set()
    log = git(repository, "log", "--reverse", "--format=%H %cs", "HEAD", "--", BELOW)
    for line in log.splitlines():
        commit, date = line.split()
        listed = git(repository, "ls-tree", "-r", commit, BELOW).splitlines()
        blobs = {path: entry.split()[2] for entry, path in (row.split("\t") for row in listed)}
        for path, blob in blobs.items():
            if not path.endswith(".sh"):
                continue
            name = path.removeprefix(BELOW)
            stage = next((stage for step, stage in STEPS.items() if step in name), "")
            stage = stage or {"1": "sft", "2": "reward", "3": "ppo"}[re.search(r"step(\d)", name).group(1)]  # type: ignore[union-attr]
            original = Original(repository, commit, date, path, stage)
            if (key := (blob, blobs[original.main])) not in seen:
                seen.add(key)
                yield original


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise argparse.ArgumentError(None, message)


def read_parser(source: str) -> argparse.ArgumentParser:
    """The parser of a main.py, from its `add_argument` calls."""
    parser = _Parser(allow_abbrev=False)
    for flag in ("--deepspeed", "--deepscale"):  # deepspeed.add_config_arguments
        parser.add_argument(flag, action="store_true")
        parser.add_argument(f"{flag}_config")
    for call in ast.walk(ast.parse(source)):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
            continue
        if call.func.attr != "add_argument":
            continue
        names = [ast.literal_eval(name) for name in call.args]
        options = {word.arg: word.value for word in call.keywords if word.arg not in ("help", "choices")}
        given: dict[str, Any] = {
            name or "": ast.literal_eval(value) for name, value in options.items() if name not in ("type", "required")
        }
        if kind := options.get("type"):
            given["type"] = {"int": int, "float": float}.get(ast.unparse(kind), str)
        parser.add_argument(*names, **given)
    return parser


def read_constants(original: Original) -> dict[str, float]:
    """The constants of step 3: attributes of its trainer, and the rate of the moving average."""
    trainer, helpers = (original.read(find_file(original, name)) for name in ("/ppo_trainer.py", "/utils/utils.py"))
    found = re.findall(r"self\.(\w+) = ([\d.]+)\n", trainer)
    found += re.findall(r"def moving_average\(.*(beta)=([\d.]+)", helpers)
    return {name: float(value) for name, value in found}


def find_file(original: Original, end: str) -> str:
    listed = git(original.repository, "ls-tree", "-r", "--name-only", original.commit, BELOW).splitlines()
    return next(path for path in listed if path.endswith(end))


def read_data_sets(original: Original) -> dict[str, tuple[str | None, bool]]:
    """Each data set by name -> (the split it is evaluated on, None for a part of the training rows; framed prompts)."""
    sets = {}
    for node in ast.walk(ast.parse(original.read(find_file(original, "/raw_datasets.py")))):
        if not isinstance(node, ast.ClassDef):
            continue
        text = ast.unparse(node)
        name = re.search(r"self\.dataset_name = '([^']+)'", text)
        methods = {method.name: ast.unparse(method) for method in node.body if isinstance(method, ast.FunctionDef)}
        if name and "get_eval_data" in methods:
            split = re.search(r"return self\.raw_datasets\['(\w+)'\]", methods["get_eval_data"])
            sets[name.group(1)] = (split.group(1) if split else None, "' Human: '" in methods["get_prompt"])
    return sets


def run_script(folder: Path, script: Path, arguments: list[str], environment: Mapping[str, str]) -> list[list[str]]:
    """The arguments of each `deepspeed` that a script starts, in the folder that it expects."""
    programs, noted = folder / "bin", folder / "noted"
    programs.mkdir(exist_ok=True)
    for name, body in STUBS.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n", encoding="utf-8")
        (programs / name).chmod(0o755)
    noted.write_bytes(b"")
    variables = {"PATH": f"{programs}:/usr/bin:/bin", "NOTED": str(noted), "HOME": str(folder), **environment}
    command = ["bash", str(script), *arguments]
    subprocess.run(command, cwd=Path.cwd(), env=variables, capture_output=True, timeout=60)
    words = noted.read_bytes().decode().split("\0")
    calls: list[list[str]] = [[]]
    for word in words[:-1]:
        calls[-1].append(word) if word != "\n" else calls.append([])
    return calls[:-1]


def list_cases(original: Original, text: str) -> Iterator[tuple[list[str], dict[str, str]]]:
    """The arguments and variables that a script is tried with."""
    if "HL_" in text:
        for case in FORK_CASES:
            variables = ENVIRONMENT | (MODELS if original.stage == "ppo" else {}) | case
            yield [], {name: value for name, value in variables.items() if f"{{{name}" in text}
        return
    models = ["out/actor", "out/critic"] if "=$2" in text and original.stage == "ppo" else []
    if "sweep/" in original.path:
        yield ([*models, "3", "3", *["true"] * 4, "swept"] if models else ["3", "true", "true", "swept"]), {}
    else:
        yield models, {}
        if models and "=$4" in text:
            yield [*models, "3", "0", "there"], {}


def expect(original: Original, arguments: list[str]) -> dict[str, Any]:
    """The keys of a recipe that trains as the original does with these arguments of `deepspeed`."""
    place = next(place for place, word in enumerate(arguments) if word.endswith("main.py"))
    launcher = argparse.ArgumentParser()
    launcher.add_argument("--num_gpus", type=int, default=DEVICES)
    launcher.add_argument("--num_nodes", type=int, default=1)
    launched, _ = launcher.parse_known_args(arguments[:place])
    if "--num_gpus" not in " ".join(arguments[:place]):
        launched.num_gpus = DEVICES // launched.num_nodes
    devices = launched.num_gpus * launched.num_nodes
    parser = read_parser(original.read(original.main))
    given = parser.parse_args(arguments[place + 1 :])
    words = {word.partition("=")[0] for word in arguments}
    rows = _expect_ppo(original, given, devices) if original.stage == "ppo" else _expect_step(original, given, devices)
    rows["seed"] = given.seed or 0
    split = [float(part) for part in given.data_split.split(",")]
    rows["data.stage_split"] = [part / sum(split) for part in split]
    names = [*given.data_path, *(getattr(given, "sft_only_data_path", None) or [])]
    rows["data.datasets"] = [(name, *read_data_sets(original).get(name, (None, False))) for name in names]
    rows["precision"] = given.dtype if "--dtype" in words else "auto"
    rows["output"] = os.path.normpath(given.output_dir)
    if getattr(given, "add_eot_token", False):
        rows["model.eos_token"] = getattr(given, "eot_token", "<|endoftext|>")
    hpz = [getattr(given, f"zero_hpz_enabled{name}", False) for name in ("", "_actor", "_critic")]
    stages = [getattr(given, f"{name}zero_stage", 0) for name in ("", "actor_", "critic_")]
    if launched.num_nodes > 1 and any(on and stage == 3 for on, stage in zip(hpz, stages)):
        rows["engine.deepspeed"] = {"zero_optimization": {"zero_hpz_partition_size": launched.num_gpus}}
    return rows


def _expect_step(original: Original, given: argparse.Namespace, devices: int) -> dict[str, Any]:
    stage = original.stage
    batch = given.per_device_train_batch_size * given.gradient_accumulation_steps * devices
    return {
        {"sft": "model.path", "reward": "reward.model", "dpo": "dpo.model"}[stage]: given.model_name_or_path,
        "length": given.max_seq_len,
        f"{stage}.batch_size": batch,
        f"{stage}.micro_batch_size": given.per_device_train_batch_size,
        f"{stage}.epochs": given.num_train_epochs,
        f"{stage}.dropout": _dropout(given, ""),
        **_expect_optimizer(given, f"{stage}.optimizer", ""),
        **_expect_role(given, stage, "", given.offload),
        **_expect_adapters(given, {stage: ""}),
        **({"dpo.beta": given.beta, "dpo.label_smoothing": given.label_smoothing} if stage == "dpo" else {}),
        **({"sft.loss_on": "all"} if stage == "sft" else {}),
    }


def _expect_ppo(original: Original, given: argparse.Namespace, devices: int) -> dict[str, Any]:
    values: dict[str, Any] = vars(given)
    drawn: int = values.get("per_device_generation_batch_size") or values["per_device_train_batch_size"]
    learned: int = values.get("per_device_training_batch_size") or values["per_device_mini_train_batch_size"]
    times: int = values.get("generation_batches") or values["generation_batch_numbers"]
    update = learned * given.gradient_accumulation_steps
    constants = read_constants(original)
    adapters_alone = bool(given.only_optimize_lora and given.actor_lora_dim)
    reference: dict[str, Any] = (
        {} if adapters_alone else {"roles.reference.zero_stage": 3 if given.actor_zero_stage == 3 else 0}
    )
    if not adapters_alone:
        reference["roles.reference.offload"] = "parameters" if given.offload_reference_model else "none"
    steps = values.get("test_stop_step") if values.get("enable_test_mode") else None
    rollout = math.lcm(drawn * times, update) * devices
    pretraining = given.unsupervised_dataset_name and given.unsupervised_dataset_config_name
    return {
        "ppo.actor": given.actor_model_name_or_path,
        "ppo.reward_model": given.critic_model_name_or_path,
        "data.max_prompt_length": given.max_prompt_seq_len,
        "data.max_completion_length": given.max_answer_seq_len,
        "ppo.batch_size": rollout,
        "ppo.minibatch_size": update * devices,
        "ppo.generation_batch_size": drawn,
        "ppo.micro_batch_size": learned,
        "ppo.ppo_epochs": given.ppo_epochs,
        **({"ppo.epochs": given.num_train_epochs} if not steps else {}),
        **({"ppo.steps": math.ceil(steps * drawn * devices / rollout)} if steps else {}),
        "ppo.dropout": _dropout(given, "actor_"),
        "ppo.critic_dropout": _dropout(given, "critic_"),
        **_expect_optimizer(given, "ppo.optimizer", "actor_"),
        **_expect_optimizer(given, "ppo.critic_optimizer", "critic_"),
        **_expect_role(given, "actor", "actor_", given.offload),
        **_expect_role(given, "critic", "critic_", given.offload),
        **_expect_adapters(given, {"actor": "actor_", "critic": "critic_"}),
        **reference,
        "roles.reward.zero_stage": 3 if given.critic_zero_stage == 3 else 0,
        "ppo.ema": round(constants["beta"] ** given.gradient_accumulation_steps, 6) if given.enable_ema else None,
        "ppo.tensor_parallel": given.inference_tp_size if given.inference_tp_size > 1 else None,
        "ppo.kl_coef": constants["kl_ctl"],
        "ppo.score_clip": constants["clip_reward_value"],
        "ppo.clip": constants["cliprange"],
        "ppo.value_clip": constants["cliprange_value"],
        "ppo.gamma": constants["gamma"],
        "ppo.lam": constants["lam"],
        "ppo.whiten_advantages": False,
        "ppo.ptx_coef": given.unsup_coef if pretraining else 0.0,
    }


def _dropout(given: argparse.Namespace, prefix: str) -> float | None:
    if getattr(given, f"disable_{prefix}dropout", False):
        return 0.0
    value: float | None = getattr(given, f"{prefix}dropout", None)
    return value


def _expect_optimizer(given: argparse.Namespace, section: str, prefix: str) -> dict[str, Any]:
    names = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
    return {
        f"{section}.learning_rate": getattr(given, f"{prefix}learning_rate"),
        f"{section}.weight_decay": getattr(given, f"{prefix}weight_decay"),
        f"{section}.schedule": names[given.lr_scheduler_type],
        f"{section}.warmup": given.num_warmup_steps,
        f"{section}.min_lr_ratio": 0.0,
    }


def _expect_role(given: argparse.Namespace, role: str, prefix: str, offload: bool) -> dict[str, Any]:
    stage = getattr(given, f"{prefix}zero_stage")
    return {
        f"roles.{role}.zero_stage": stage,
        f"roles.{role}.gradient_checkpointing": bool(getattr(given, f"{prefix}gradient_checkpointing")),
        f"roles.{role}.offload": ("none", "optimizer", "optimizer", "all")[stage] if offload else "none",
    }


def _expect_adapters(given: argparse.Namespace, prefixes: Mapping[str, str]) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    scopes = []
    for role, prefix in prefixes.items():
        rank = getattr(given, f"{prefix}lora_dim")
        rows[f"roles.{role}.lora_rank"] = rank
        if not rank:
            continue
        rate = getattr(given, f"{prefix}lora_learning_rate", getattr(given, f"{prefix}learning_rate"))
        rows[f"roles.{role}.lora_learning_rate"] = rate
        scopes.append(getattr(given, f"{prefix}lora_module_name"))
        # lora.py of all versions: output + input @ right @ left / dim, right uniform within 1 / sqrt(dim), left 0.
        rows |= {"lora.alpha": 1.0, "lora.init": "rank"}
        rows["lora.also_train"] = () if given.only_optimize_lora else ("norms", "biases", "embeddings")
    if scopes:
        rows["adapted"] = scopes
    return rows


def read_recipe(recipe: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the expected keys in a recipe."""
    path = Path("recipe.yaml").resolve()
    path.write_text(recipe, encoding="utf-8")
    config = load_config(path)
    return {key: _read_key(config, key, value) for key, value in keys.items()}


def _read_key(config: Config, key: str, expected: Any) -> Any:
    if key == "length":
        return config.data.max_prompt_length + config.data.max_completion_length
    if key == "data.datasets":
        return [(source.path, *_read_source(source)) for source in config.data.datasets]
    if key == "data.stage_split":
        return [part / sum(config.data.stage_split) for part in config.data.stage_split]
    if key == "output":
        return str(config.output) if os.path.isabs(expected) else os.path.relpath(config.output)
    if key == "adapted":
        patterns = [re.compile(name.removeprefix("re:")) for name in config.lora.target_modules]
        paths = [f"model.{scope.removeprefix('rw')}0.attention" for scope in expected]
        outside = any(pattern.fullmatch(path) for pattern in patterns for path in ("lm_head", "score"))
        adapted = all(any(pattern.fullmatch(path) for pattern in patterns) for path in paths) and not outside
        return expected if adapted else config.lora.target_modules
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    if value is None and key.startswith("roles."):
        return {"zero_stage": 0, "offload": "none", "gradient_checkpointing": False, "lora_rank": 0}.get(
            key.rpartition(".")[2]
        )
    return value


def _read_source(source: Any) -> tuple[str | None, bool]:
    """Return (the split that a source is evaluated on, whether its prompts are framed)."""
    spec, _ = SourceSpec.for_training(source).apply_known_dataset()
    return source.heldout_split, spec.template == " Human: {prompt} Assistant:"


@contextlib.contextmanager
def in_folder(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def compare(original: Original, folder: Path) -> Iterator[tuple[str, int, list[str]]]:
    """Yield (the case, its number of values, its differences) for each way to start a script."""
    text = original.read(original.path)
    for name, model in (("ACTOR", "actor"), ("CRITIC", "critic")):  # as the first versions ask their users
        text = re.sub(rf"^{name}_MODEL_PATH= *#.*$", f"{name}_MODEL_PATH=out/{model}", text, flags=re.MULTILINE)
    script = folder / original.path.removeprefix(BELOW)
    main = folder / original.main.removeprefix(BELOW)
    files = [(script, text), (main, original.read(original.main))]
    if original.stage == "ppo":
        trainer = find_file(original, "/ppo_trainer.py")
        files.append((folder / trainer.removeprefix(BELOW), original.read(trainer)))
    for path, content in files:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    for arguments, environment in list_cases(original, text):
        name = " ".join(
            [*arguments, *(f"{name}={value}" for name, value in environment.items() if name not in ENVIRONMENT)]
        )
        with in_folder(main.parent):
            calls = run_script(folder, script, arguments, environment)
            command = f"bash {script} {' '.join(arguments)}"
            try:
                expected = expect(original, calls[0]) if len(calls) == 1 else {}
            except argparse.ArgumentError as error:
                yield f"{name} (its main.py refuses it: {error})", 0, []
                continue
            try:
                recipe = translate_commands([command], environment, DEVICES)
            except ConfigError as error:
                is_answered = not expected and re.search(r"`rlhf (sweep|compare|evaluate)[^`]*`", str(error))
                yield name, 0, [] if is_answered else [f"refused: {error}"]
                continue
            if not expected:
                yield name, 0, [f"translated, but the script starts {len(calls)} trainings"]
                continue
            values = read_recipe(format_translation(recipe), expected)
            differences = [
                f"{key}: {expected[key]!r} there, {values[key]!r} here"
                for key in expected
                if not _is_equal(expected[key], values[key])
            ]
            if recipe.stages != [original.stage]:
                differences.append(f"stage {original.stage} there, {recipe.stages} here")
            yield name, len(expected), differences


def _is_equal(expected: Any, value: Any) -> bool:
    if isinstance(expected, float) and isinstance(value, int | float):
        return math.isclose(expected, value, rel_tol=1e-9)
    return bool(expected == value or (isinstance(expected, list) and list(value or ()) == expected))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repositories", nargs="+", type=Path, metavar="GIT_DIRECTORY")
    parser.add_argument("--table", type=Path, help="write a table of all scripts to this file, in Markdown")
    options = parser.parse_args()
    lines = ["| date | script | case | values | differences |", "|---|---|---|---|---|"]
    seen: set[str] = set()
    scripts, total, wrong = set(), 0, 0
    for repository in options.repositories:
        for original in find_originals(repository):
            text, source = original.read(original.path), original.read(original.main)
            flags = sorted(f"{action.option_strings} {action.default}" for action in read_parser(source)._actions)
            constants = read_constants(original) if original.stage == "ppo" else {}
            version = f"{original.stage} {text} {flags} {constants} {read_data_sets(original)}"
            if version in seen:
                continue
            seen.add(version)
            with tempfile.TemporaryDirectory() as folder:
                for case, number, differences in compare(original, Path(folder)):
                    scripts.add(text)
                    total += number
                    wrong += bool(differences)
                    name = original.path.removeprefix(BELOW).replace("training_scripts/", "")
                    lines.append(f"| {original.date} | {name} | {case} | {number} | {'; '.join(differences)} |")
                    for difference in differences:
                        print(f"{original.date} {name} {case}: {difference}")
    if options.table:
        options.table.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(scripts)} scripts, {len(lines) - 2} cases, {total} values; {wrong} cases with differences")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
