"""Measure the time and memory that a stage needs to prepare its rows: with tokens in memory, and with an Arrow cache.

    python ci/bench/tokenizing.py                       200,000 rows of about 200 tokens (a few minutes)
    python ci/bench/tokenizing.py --rows 20000          fewer rows
    python ci/bench/tokenizing.py --world               the embedded data, as in the quickstart
    python ci/bench/tokenizing.py --ways first second   only some of the ways

Each way runs in a separate process and prints one line of JSON. There is no baseline: compare the ways.

    memory    keep rows and tokens in memory, as every rank does if the cache cannot be written
    first     tokenize the rows and write the cache, as a first run does
    second    find the cache, as the next run does (run `first` before)
    rank      open the cache that another rank has built (run `first` before)

`seconds` is the time to prepare the rows, `epoch_seconds` the time to read every example once, as an epoch does;
`first`, `second` and `rank` create the examples meanwhile. `peak_mib` is the peak of the process in addition to its
libraries. `own_mib` is the memory at the end that other processes do not share; pages of files are shared.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

WAYS = ("memory", "first", "second", "rank")
WORDS = 500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000, help="rows of about 200 tokens (default: %(default)s)")
    parser.add_argument("--world", action="store_true", help="use the embedded data instead")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="ways to measure (default: all)")
    parser.add_argument("--worker", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(measure_way(arguments.worker, arguments.folder, world=arguments.world)))
        return
    with tempfile.TemporaryDirectory() as folder:
        if not arguments.world:
            write(Path(folder, "rows.jsonl"), arguments.rows)
        for way in arguments.ways:
            command = [sys.executable, __file__, "--worker", way, "--folder", folder]
            command += ["--world"] * arguments.world
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            print(output.splitlines()[-1], flush=True)


def words() -> list[str]:
    """Return made-up words; each becomes one token."""
    rng = random.Random(0)
    return ["".join(rng.choices("bdfgklmnprstvz", k=3)) + "aeiou"[number % 5] for number in range(WORDS)]


def write(path: Path, rows: int) -> None:
    """Write rows with a prompt and a response of 60 to 140 words each."""
    rng, vocabulary = random.Random(1), words()
    with path.open("w") as file:
        for number in range(rows):
            prompt, response = (" ".join(rng.choices(vocabulary, k=rng.randint(60, 140))) for _ in range(2))
            file.write(json.dumps({"prompt": f"{number} {prompt}", "response": response}) + "\n")


def measure_way(way: str, folder: Path, *, world: bool) -> dict[str, object]:
    """Return the figures of one way, measured in this process."""
    os.environ["HF_DATASETS_CACHE"] = str(folder / "kept")
    import pyarrow.ipc  # noqa: F401
    import transformers  # noqa: F401

    from rlhf.config.schema import DataConfig
    from rlhf.data.cache import StageCache
    from rlhf.data.load_sources import read_sources
    from rlhf.data.stage_dataset import load_stage
    from rlhf.data.toy_world import build_tokenizer, build_world_tokenizer

    path = "world" if world else str(folder / "rows.jsonl")
    config = DataConfig(datasets=[{"path": path, "stages": ["sft"]}])
    tokenizer = build_world_tokenizer() if world else build_tokenizer([" ".join(["", *words()] * 3)], vocab_size=4000)
    cache = StageCache(config, "sft", tokenizer, 0, [tokenizer.eos_token_id])
    tokenizer("warm", add_special_tokens=False)
    before, anonymous, start = resident("VmRSS"), resident("RssAnon"), time.perf_counter()
    if way == "memory":
        data = load_stage(config, "sft", tokenizer, seed=0, sources=read_sources(config, ["sft"], seed=0))
    elif way == "rank":
        data = cache.load()
    else:
        cache.build()
        data = cache.load()
    seconds = time.perf_counter() - start
    start = time.perf_counter()
    tokens = sum(len(example.prompt_ids) + len(example.completion_ids) for example in data.train)
    return {
        "way": way,
        "rows": len(data.train) + len(data.heldout),
        "tokens": tokens,
        "seconds": round(seconds, 2),
        "epoch_seconds": round(time.perf_counter() - start, 2),
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before),
        "own_mib": round(resident("RssAnon") - anonymous),
    }


def resident(name: str) -> float:
    """Return a memory figure of this process from /proc/self/status, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) / 1024


if __name__ == "__main__":
    main()
