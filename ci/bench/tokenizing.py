"""What it takes to prepare a stage's rows: seconds and memory, held in memory by each rank, and kept in Arrow.

    python ci/bench/tokenizing.py                  200,000 rows of about 200 tokens (a few minutes)
    python ci/bench/tokenizing.py --rows 20000     fewer
    python ci/bench/tokenizing.py --world          the embedded data, as in the quickstart

Each way runs in a process of its own: `memory` holds the rows and their tokens, as every rank does where they cannot be
kept; `first` tokenizes and keeps them; `second` finds them, as the next run does; `rank` opens them beside the one that
did. `first`, `second` and `rank` then make every example once, as an epoch does. The peak is what the process took
beyond its libraries; of it, `own` is what other processes do not share at the end (pages of files they do).
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
    parser.add_argument("--world", action="store_true", help="the embedded data instead")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="those to run (default: all)")
    parser.add_argument("--worker", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(measured(options.worker, options.folder, world=options.world)))
        return
    with tempfile.TemporaryDirectory() as folder:
        if not options.world:
            write(Path(folder, "rows.jsonl"), options.rows)
        for way in options.ways:
            command = [sys.executable, __file__, "--worker", way, "--folder", folder]
            command += ["--world"] * options.world
            found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]
            print(found, flush=True)


def words() -> list[str]:
    """Made-up words, each of which becomes one token."""
    rng = random.Random(0)
    return ["".join(rng.choices("bdfgklmnprstvz", k=3)) + "aeiou"[number % 5] for number in range(WORDS)]


def write(path: Path, rows: int) -> None:
    """Rows of a prompt and a response of 60 to 140 words each."""
    rng, known = random.Random(1), words()
    with path.open("w") as file:
        for number in range(rows):
            prompt, response = (" ".join(rng.choices(known, k=rng.randint(60, 140))) for _ in range(2))
            file.write(json.dumps({"prompt": f"{number} {prompt}", "response": response}) + "\n")


def measured(way: str, folder: Path, *, world: bool) -> dict[str, object]:
    """One way's numbers, in this process."""
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
    """MiB of this process, as the kernel names them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) / 1024


if __name__ == "__main__":
    main()
