"""What loading costs each rank in memory: models of a known shape at ZeRO-3, from files of random bf16 weights.

    python ci/bench/loading.py                                             opt-125m, PPO's four models, two ranks
    python ci/bench/loading.py --shape opt-1.3b --roles reference          one of them, of another shape
    python ci/bench/loading.py --engines                                   trained ones with their optimizers

A rank may take, beside what the process has before: what it keeps of the models, one file, and 300 MiB. Peaks are the
kernel's (VmHWM), of which pages of mapped files are a part. The results go to ci/bench/results.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from machine import machine, results_file  # noqa: E402
from random_models import make  # noqa: E402

SHAPES = ("opt-125m", "opt-1.3b")
ROLES = ("actor", "critic", "reference", "reward")
FILE = 500 * 2**20
SLACK = 300 * 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="opt-125m")
    parser.add_argument("--roles", nargs="+", choices=ROLES, default=ROLES)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--engines", action="store_true", help="wrap what is trained in its engine, with its optimizer")
    parser.add_argument("--folder", type=Path, help="where the models are kept; without it, they are made anew")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)  # of a rank
    arguments = parser.parse_args()
    if arguments.out:
        return measure(arguments)
    with tempfile.TemporaryDirectory() as folder:
        return compare(arguments, Path(folder))


def compare(arguments: argparse.Namespace, out: Path) -> int:
    """Run the ranks and print what they took; 1 where one took too much."""
    from rlhf.launchers import local

    folder = arguments.folder or out / "models"
    for kind in ("causal", "scalar"):
        make(folder / arguments.shape / kind, arguments.shape, scalar_head=kind == "scalar", file_size=FILE)
    command = [sys.executable, __file__, "--out", str(out), "--folder", str(folder), "--shape", arguments.shape]
    command += ["--roles", *arguments.roles, *(["--engines"] if arguments.engines else [])]
    outcome = local.spawn_ranks(arguments.ranks, command)
    if outcome:
        print(outcome.line)
        return 1
    found = [json.loads((out / f"{rank}.json").read_text()) for rank in range(arguments.ranks)]
    print(f"{arguments.shape}: {', '.join(arguments.roles)}; MiB")
    print("rank   before   kept   file   allowed   peak")
    fits = True
    for rank, each in enumerate(found):
        allowed = each["before"] + each["kept"] + FILE + SLACK
        fits &= each["peak"] <= allowed
        numbers = (each["before"], each["kept"], FILE, allowed, each["peak"])
        print(f"{rank:4}", *(f"{number / 2**20:8,.0f}" for number in numbers))
    name = f"loading-{arguments.shape}-{arguments.ranks}{'-engines' if arguments.engines else ''}"
    written = results_file(Path(__file__).parent, name)
    written.write_text(
        json.dumps({"machine": machine(), "roles": list(arguments.roles), "ranks": found}, indent=2) + "\n"
    )
    return 0 if fits else 1


def measure(arguments: argparse.Namespace) -> int:
    """What one rank does: it loads the models one after the other, as a stage does."""
    import accelerators
    from rlhf.config.schema import ModelConfig, OptimizerConfig, build_config
    from rlhf.engine import distributed
    from rlhf.engine.deepspeed_config import build_deepspeed_config
    from rlhf.engine.engine import TrainingEngine, freeze_model
    from rlhf.models.forward import ScalarHead
    from rlhf.models.loading import load_causal_lm, load_model_tokenizer, load_scalar_head
    from rlhf.models.weight_loading import place_sharded
    from rlhf.roles.roles import model_placements

    held = model_placements(build_config({"engine": {"zero_stage": 3}}), "ppo")
    models: list[Any] = []
    with distributed.start_process_group(accelerators.select("cpu", environ={})) as accelerator:
        precision = accelerator.precision("bf16")
        paths = {kind: str(arguments.folder / arguments.shape / kind) for kind in ("causal", "scalar")}
        tokenizer = load_model_tokenizer(ModelConfig(path=paths["causal"]))[0]
        import transformers.models.opt.modeling_opt  # noqa: F401

        numbers = 0
        gc.collect()
        before = status("VmRSS")
        for role in arguments.roles:
            placement = held[role]
            load = load_scalar_head if placement.role.scalar_head else load_causal_lm
            model = load(
                ModelConfig(),
                tokenizer,
                attention="sdpa",
                path=paths["scalar" if placement.role.scalar_head else "causal"],
                put=place_sharded(build_deepspeed_config(placement, accelerator, precision, 1, 1), precision.dtype),
            )
            size = sum(parameter.ds_numel for parameter in model.parameters())
            numbers += 2 * size
            model = ScalarHead(model) if placement.role.scalar_head else model
            common: dict[str, Any] = {"accelerator": accelerator, "precision": precision, "placement": placement}
            if not placement.role.trained:
                model = freeze_model(model, **common)
            elif arguments.engines:
                common |= {"optimizer": OptimizerConfig(), "total_steps": 1, "micro_batch_size": 1, "accumulation": 1}
                model = TrainingEngine(role, model, **common)
                numbers += (4 + 8 + 2) * size  # masters, two moments, gradients
            models.append(model)
        distributed.all_gather_objects(None)
        found = {"before": before, "kept": numbers // distributed.world().size, "peak": status("VmHWM")}
        Path(arguments.out, f"{distributed.world().rank}.json").write_text(json.dumps(found))
    return 0


def status(key: str) -> int:
    """A number of this process in /proc, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


if __name__ == "__main__":
    sys.exit(main())
