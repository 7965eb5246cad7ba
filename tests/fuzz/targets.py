"""The places at which rlhf reads what others wrote: how inputs for each are made, and the call that reads them."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from rlhf.config.schema import EMBEDDED_RECIPE, EVERY_STAGE, ColumnsConfig, Config, build_config, load_config
from tests.fuzz import run_folder
from tests.fuzz.inputs import changed_bytes, changed_json, changed_json_lines, changed_value, values

Files = dict[str, bytes]
Call = Callable[[Any], object]
"""Reads an input in the current folder, which is empty; may raise errors that the user can fix."""


class Target(NamedTuple):
    """A kind of input: its part of all inputs, in thousandths, and (a strategy, the call), built in a new folder."""

    share: int
    build: Callable[[Path], tuple[SearchStrategy[Any], Call]]


def changed_file(files: Files, changes: Mapping[str, Callable[..., SearchStrategy[bytes]]]) -> SearchStrategy[Files]:
    """Some files, of which one is missing or changed, by `changes` of the end of its name."""

    def change(name: str) -> SearchStrategy[Files]:
        contents = next(change for end, change in changes.items() if name.endswith(end))(files[name])
        return contents.map(lambda content: {**files, name: content})

    without = st.sampled_from(sorted(files)).map(lambda name: {key: files[key] for key in files if key != name})
    return st.one_of(*map(change, files), without)


def write(files: Files, folder: str = ".") -> None:
    for name, content in files.items():
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def read_files(folder: Path) -> Files:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def recipes(_: Path) -> tuple[SearchStrategy[Any], Call]:
    def list_keys(value: Any, prefix: str = "") -> list[str]:
        below = value.items() if isinstance(value, dict) else ()
        return [prefix, *(key for name, part in below for key in list_keys(part, f"{prefix}.{name}"))]

    whole = Config().model_dump(mode="json")
    keys = [key[1:] for key in list_keys(whole)[1:]]
    small = EMBEDDED_RECIPE.read_bytes().partition(b"reward:")[0]
    anchors = b"sft: &a {epochs: 1, optimizer: {learning_rate: 1e-3}}\nreward: {<<: *a}\nppo: {steps: 0x10}\n"
    texts = changed_bytes(b"data.datasets.0.path=a.jsonl", b"lora={rank: 8}").map(lambda text: text.decode("latin-1"))
    overrides = st.builds("{}={}".format, st.sampled_from(keys), values.map(json.dumps)) | texts
    return st.tuples(changed_bytes(small, anchors) | changed_value(whole), st.lists(overrides, max_size=2)), read_recipe


def read_recipe(given: tuple[Any, list[str]]) -> None:
    from rlhf.config.dump import format_recipe
    from rlhf.roles.roles import check_placements, model_placements

    content, overrides = given
    if isinstance(content, bytes):
        write({"recipe.yaml": content})
    config = load_config(Path("recipe.yaml"), overrides) if isinstance(content, bytes) else build_config(content)
    format_recipe(config, "a test")
    check_placements(config, [stage for stage in EVERY_STAGE if stage != "distill" or config.distill.teacher])
    for stage in EVERY_STAGE:
        model_placements(config, stage)
        config.total_steps(stage, 100)


ROWS = [
    {"prompt": "Human: a cow? Assistant:", "response": "moo", "chosen": "moo", "rejected": "no"},
    {"prompt": "b", "response": "c", "chosen": "d", "rejected": "e"},
]
TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
CHATS = [
    {"messages": TURNS, "chosen": TURNS, "rejected": TURNS, "responses": [{"text": "x", "score": 1.0}], "margin": 1}
]


def rows(_: Path) -> tuple[SearchStrategy[Any], Call]:
    lines = ["".join(json.dumps(row) + "\n" for row in table).encode() for table in (ROWS, CHATS)]
    whole = [json.dumps(table).encode() for table in (ROWS, CHATS, {"data": ROWS})]
    csv = b'prompt,response,chosen,rejected\r\n"a, b",c,"d\ne",f\r\n1,2,3,4\r\n'
    files = st.one_of(
        changed_json_lines(*lines).map(lambda content: {"rows.jsonl": content}),
        (changed_json(*whole) | changed_bytes(*lines)).map(lambda content: {"rows.json": content}),
        changed_bytes(csv, csv.replace(b",", b";")).map(lambda content: {"rows.csv": content}),
    )
    return st.tuples(files, settings_of_sources()), read_rows


def tables(folder: Path) -> tuple[SearchStrategy[Any], Call]:
    """Parquet files, saved data sets and folders, which other libraries read."""
    import pyarrow as pa
    from datasets import Dataset, DatasetDict
    from pyarrow import parquet

    parquet.write_table(pa.Table.from_pylist(CHATS), buffer := io.BytesIO())
    Dataset.from_list(ROWS).save_to_disk(folder / "one" / "rows")
    DatasetDict({"train": Dataset.from_list(ROWS)}).save_to_disk(folder / "several" / "rows")
    about = b"---\nconfigs:\n- config_name: a\n  data_files: train.jsonl\n---\n"
    plain = {"rows/train.jsonl": json.dumps(ROWS[0]).encode(), "rows/README.md": about}
    changes = {".json": changed_json, "": changed_bytes}
    saved = st.one_of(*(changed_file(read_files(folder / name), changes) for name in ("one", "several")))
    table = changed_bytes(buffer.getvalue()).map(lambda content: {"rows.parquet": content})
    # A folder of plain files takes the library a tenth of a second.
    files = st.integers(0, 49).flatmap(lambda number: saved | table if number else changed_file(plain, changes))
    return st.tuples(files, settings_of_sources()), read_rows


def settings_of_sources() -> SearchStrategy[tuple[str, dict[str, Any]]]:
    """Who reads a source, and which columns and how many rows."""
    names = st.sampled_from(["prompt", "response", "chosen", "rejected", "messages", "responses", "text", "x", ""])
    columns = st.dictionaries(st.sampled_from(sorted(ColumnsConfig.model_fields)), names, max_size=2)
    options = st.just({}) | st.fixed_dictionaries({}, optional={"columns": columns, "limit": st.integers(1, 3)})
    return st.tuples(st.sampled_from([*EVERY_STAGE, "pretraining"]), options)


def read_rows(given: tuple[Files, tuple[Any, dict[str, Any]]]) -> None:
    from rlhf.data.load_sources import read_sources
    from rlhf.data.pretraining import read_documents

    files, (reader, options) = given
    write(files)
    path = str(Path(next(iter(files), "rows").partition("/")[0]).absolute())
    if reader == "pretraining":
        read_documents(build_config({"data": {"pretraining": [{"path": path, "text": "prompt"}]}}))
        return
    config = build_config({"data": {"datasets": [{"path": path, **options}]}})
    sources = read_sources(config.data, [reader], seed=0, records=True)
    sources.fingerprints()
    for source in sources._read:
        source.content()


def runs(folder: Path) -> tuple[SearchStrategy[Any], Call]:
    run_folder.write_valid(folder / "run")
    files = {name: content for name, content in read_files(folder / "run").items() if "tensorboard" not in name}
    changes = {".jsonl": changed_json_lines, ".json": changed_json, "": changed_bytes}
    return st.tuples(changed_file(files, changes), st.sampled_from(run_folder.READERS)), partial(read_folder, "run")


def read_folder(name: str, given: tuple[Files, Callable[[Path], None]]) -> None:
    files, read = given
    write(files, name)
    read(Path(name).absolute())


def environments(_: Path) -> tuple[SearchStrategy[Any], Call]:
    from rlhf.utils import process_info

    tried = (process_info._TORCH, process_info._MPIRUN, process_info._SRUN)
    names = [name for table in tried for group in table.values() for name in group]
    names += ["MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_ID", "SLURM_STEPID", "SLURM_JOB_ID", "SLURM_STEP_NODELIST"]
    names += ["SLURM_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_LAUNCH_NODE_IPADDR", "PMIX_NAMESPACE"]
    names += [*process_info._MARKS, "RLHF_RENDEZVOUS", "RLHF_SECRET", "RLHF_PROBE_TIMEOUT"]
    odd = ["4294967295", "9" * 5000, "1e3", "0x1", "٣", " 1 ", "1_0", "", "[", "a" * 5000, ":", "a:b:c", "none"]
    texts = st.sampled_from([*odd, "2(x3),1", "2(x99999999999)", "node[01-03,7],a", "10.0.0.1:1"])
    number = st.integers(-1, 4)
    torch, slurm = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1"}
    changes = st.dictionaries(st.sampled_from(names), number.map(str) | texts, max_size=6)
    options = st.tuples(st.none() | number, st.none() | number, st.none() | texts)
    return st.tuples(st.builds(dict.__or__, st.sampled_from([{}, torch, slurm]), changes), options), read_environment


def read_environment(given: tuple[dict[str, str], tuple[Any, Any, Any]]) -> None:
    from accelerators.discovery import time_limit
    from rlhf.launchers.local import should_spawn
    from rlhf.launchers.multinode import resolve_node
    from rlhf.utils.process_info import current_process

    environment, options = given
    with mock.patch.dict("os.environ", environment, clear=True):
        time_limit(environment)
        process = current_process()
        process.variables()
        process.launcher_options()
        should_spawn(options[0])
        resolve_node(*options)


def plugins(_: Path) -> tuple[SearchStrategy[Any], Call]:
    files = {
        "entry_points.txt": b"[rlhf.accelerators]\na = probe\n[rlhf.sinks]\na = probe\n",
        "METADATA": b"Metadata-Version: 2.1\nName: probe\nVersion: 1.0\n",
        "top_level.txt": b"probe\n",
    }
    hook = "from rlhf.reporting.hookspecs import hookimpl\nf = dict\n@hookimpl\ndef rlhf_sinks():\n    return {}\n"
    answers = (st.just({"a": "probe:f"}) | values).map(lambda value: hook.format(repr(value)).encode(errors="replace"))
    return st.tuples(changed_file(files, {"": changed_bytes}), answers), read_plugin


def read_plugin(given: tuple[Files, bytes]) -> None:
    from accelerators.discovery import available, blame_plugin
    from rlhf.reporting.sinks import find_sink

    write(given[0], "probe-1.0.dist-info")
    write({"probe.py": given[1]})
    sys.modules.pop("probe", None)
    with mock.patch.object(sys, "path", [str(Path.cwd())]):
        assert all(report.reason for report in available({}))
        blame_plugin(ValueError())
        find_sink("a", "sinks")


def scripts(_: Path) -> tuple[SearchStrategy[Any], Call]:
    folder = Path(__file__).parents[1] / "contrib" / "deepspeed_chat" / "scripts"
    tests = b"A=$((1 + 2)); if [ -z $B ]; then B=${C:-3}; fi\ndeepspeed main.py --data_path a --zero_stage $B\n"
    valid = [*(path.read_bytes() for path in sorted(folder.glob("*.sh"))), tests]
    names = st.sampled_from(["HL_NUM_NODES", "HL_ACTOR_ZERO_STAGE", "HL_TAG", "HL_X"])
    variables = st.dictionaries(names, st.sampled_from(["1", "", "x"]), max_size=2)
    contents = changed_bytes(*valid) | changed_bytes(tests)
    return st.tuples(contents, st.booleans(), variables, st.none() | st.integers(1, 8)), read_script


def read_script(given: tuple[bytes, bool, dict[str, str], int | None]) -> None:
    from rlhf.contrib.deepspeed_chat.translate import format_translation, translate_commands

    content, is_file, variables, devices = given
    write({"run.sh": content})
    text = "bash run.sh out 3" if is_file else content.decode(errors="replace")
    write({"recipe.yaml": format_translation(translate_commands([text], variables, devices)).encode()})
    load_config(Path("recipe.yaml"))


def models(folder: Path) -> tuple[SearchStrategy[Any], Call]:
    from tests.helpers import build_tokenizer, llama

    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder)
    llama(len(tokenizer), num_hidden_layers=1).save_pretrained(folder)
    files = changed_file(
        read_files(folder), {".safetensors": changed_safetensors, ".json": changed_json, "": changed_bytes}
    )
    return st.tuples(files, st.sampled_from([load_model, load_critic, load_rows, inspect_model])), partial(
        read_folder, "model"
    )


def changed_safetensors(content: bytes) -> SearchStrategy[bytes]:
    """A file with changes in its header, or anywhere."""
    end = 8 + int.from_bytes(content[:8], "little")
    headers = changed_json(content[8:end])
    joined = headers.map(lambda header: len(header).to_bytes(8, "little") + header + content[end:])
    return joined | changed_bytes(content)


def load_model(path: Path) -> None:
    from rlhf.config.schema import ModelConfig
    from rlhf.models.loading import load_causal_lm, load_model_tokenizer

    config = ModelConfig(path=str(path))
    load_causal_lm(config, load_model_tokenizer(config)[0], attention="sdpa")


def load_critic(path: Path) -> None:
    from rlhf.config.schema import ModelConfig
    from rlhf.models.loading import load_model_tokenizer, load_scalar_head

    config = ModelConfig(path=str(path))
    load_scalar_head(config, load_model_tokenizer(config)[0], attention="sdpa", path=str(path), seed=0)


def load_rows(path: Path) -> None:
    from rlhf.config.schema import ModelConfig
    from rlhf.data.stage_dataset import load_stage
    from rlhf.models.loading import load_model_tokenizer

    write({"rows.json": json.dumps(ROWS).encode()})
    config = build_config({"data": {"datasets": [{"path": str(Path("rows.json").absolute())}]}})
    load_stage(config.data, "sft", load_model_tokenizer(ModelConfig(path=str(path)))[0], seed=0)


def inspect_model(path: Path) -> None:
    from rlhf.config.schema import ModelConfig
    from rlhf.models.compatibility import check_positions, check_support, load_generation_config
    from rlhf.models.shape import shape_of
    from rlhf.roles.model_identity import check_model_files, fingerprint_model

    name, config = str(path), ModelConfig(path=str(path))
    fingerprint_model(name)
    check_model_files(name)
    check_positions(name, check_support(name, config, attention="sdpa"), 100)
    load_generation_config(name, config)
    shape_of(name)


def gguf_files(folder: Path) -> tuple[SearchStrategy[Any], Call]:
    from tests.models.gguf_file import write_gguf

    write_gguf(folder / "tiny.gguf", hidden_size=32, num_hidden_layers=1)
    content = (folder / "tiny.gguf").read_bytes()
    return changed_bytes(content, content[:900]), read_gguf


def read_gguf(content: bytes) -> None:
    from rlhf.config.schema import ModelConfig
    from rlhf.models.loading import load_causal_lm
    from tests.helpers import build_tokenizer

    write({"tiny.gguf": content}, "model")
    config = ModelConfig(path=str(Path("model").absolute()), gguf_file="tiny.gguf")
    load_causal_lm(config, build_tokenizer(), attention="sdpa")


def checkpoints(_: Path) -> tuple[SearchStrategy[Any], Call]:
    import torch
    from safetensors.torch import save

    def pickle(value: Any) -> bytes:
        torch.save(value, buffer := io.BytesIO(), pickle_protocol=2)
        return buffer.getvalue()

    sizes = {"weight/a.b/0": 4, "weight/a.b/4": 2, "exp_avg/a.b/0": 6, "step/a.b/0": 1}
    files = {
        "actor/rank0.safetensors": save({key: torch.ones(size) for key, size in sizes.items()}),
        "state.pt": pickle({"state": {"best": 1.0, "kl": torch.ones(2)}, "engines": {"actor": {"global_steps": 1}}}),
        "random-rank0.pt": pickle({"torch": torch.get_rng_state()}),
    }
    return changed_file(files, {".safetensors": changed_safetensors, ".pt": changed_bytes}), read_checkpoint


def read_checkpoint(files: Files) -> None:
    import torch

    from rlhf.checkpoint.engine_state import Key, SavedTensors
    from rlhf.checkpoint.training_state import restore_checkpoint
    from rlhf.runs.directory import RunDirectory
    from rlhf.utils.manifest import write_manifest

    stage = RunDirectory(Path.cwd()).stage("ppo")
    folder = stage.checkpoints / "step-00000003"
    write(files, str(folder))
    write_manifest(folder)  # its digests are those of the changed files
    restore_checkpoint(stage, {})
    try:
        with SavedTensors(folder / "actor") as saved:
            for kind, name in [*saved._parts]:
                saved.read(Key(kind, name, 0), torch.empty(6))
                saved.read_counter("step", name)
    except Exception:  # restore_checkpoint makes a user's error of all of them
        raise stage.unreadable("a test") from None


TARGETS = {
    "recipes": Target(200, recipes),
    "rows": Target(220, rows),
    "tables": Target(60, tables),
    "runs": Target(180, runs),
    "environments": Target(70, environments),
    "plugins": Target(30, plugins),
    "scripts": Target(60, scripts),
    "models": Target(100, models),
    "gguf": Target(20, gguf_files),
    "checkpoints": Target(60, checkpoints),
}
