"""Measure the peak memory of each rank while it loads models of a known shape at ZeRO-3, against an allowed peak.

    python ci/bench/loading.py                                             opt-125m, PPO's four models, two ranks
    python ci/bench/loading.py --shape opt-1.3b --roles reference          one model of another shape
    python ci/bench/loading.py --engines                                   trained models with their optimizers

The models are loaded from files of random bf16 weights. The allowed peak of a rank is the memory of the process before
loading, plus the rank's share of the models, plus one file (500 MiB), plus 300 MiB. Peaks come from the kernel (VmHWM)
and include pages of mapped files. The results are written to ci/bench/results. The exit code is 1 if a rank exceeds
its allowed peak.
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
FILE = 500 * 2**20  # bytes of weights per file
SLACK = 300 * 2**20  # bytes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="opt-125m", help="default: %(default)s")
    parser.add_argument("--roles", nargs="+", choices=ROLES, default=ROLES, help="models to load (default: all)")
    parser.add_argument("--ranks", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--engines", action="store_true", help="give trained models their engines, with optimizers")
    parser.add_argument("--folder", type=Path, help="folder of the models (default: temporary)")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)  # passed to a rank only
    arguments = parser.parse_args()
    if arguments.out:
        return measure(arguments)
    with tempfile.TemporaryDirectory() as folder:
        return compare(arguments, Path(folder))


def compare(arguments: argparse.Namespace, out: Path) -> int:
    """Run the ranks, print and write their peaks, and return the exit code: 1 if a rank exceeded its allowed peak."""
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
    ranks = [json.loads((out / f"{rank}.json").read_text()) for rank in range(arguments.ranks)]
    print(f"{arguments.shape}: {', '.join(arguments.roles)}; MiB")
    print("rank   before   kept   file   allowed   peak")
    fits = True
    for rank, memory in enumerate(ranks):
        allowed = memory["before"] + memory["kept"] + FILE + SLACK
        fits &= memory["peak"] <= allowed
        columns = (memory["before"], memory["kept"], FILE, allowed, memory["peak"])
        print(f"{rank:4}", *(f"{size / 2**20:8,.0f}" for size in columns))
    name = f"loading-{arguments.shape}-{arguments.ranks}{'-engines' if arguments.engines else ''}"
    output = results_file(Path(__file__).parent, name)
    output.write_text(
        json.dumps({"machine": machine(), "roles": list(arguments.roles), "ranks": ranks}, indent=2) + "\n"
    )
    return 0 if fits else 1


def measure(arguments: argparse.Namespace) -> int:
    """Load the models one after the other, as a stage does, and write the memory of this rank."""
    import accelerators
    from rlhf.config.schema import ModelConfig, OptimizerConfig, build_config
    from rlhf.engine import distributed
    from rlhf.engine.deepspeed_config import build_deepspeed_config
    from rlhf.engine.engine import TrainingEngine, freeze_model
    from rlhf.models.forward import ScalarHead
    from rlhf.models.loading import load_causal_lm, load_model_tokenizer, load_scalar_head
    from rlhf.models.weight_loading import place_sharded
    from rlhf.roles.roles import model_placements

    placements = model_placements(build_config({"engine": {"zero_stage": 3}}), "ppo")
    models: list[Any] = []
    with distributed.start_process_group(accelerators.select("cpu", environ={})) as accelerator:
        precision = accelerator.precision("bf16")
        paths = {kind: str(arguments.folder / arguments.shape / kind) for kind in ("causal", "scalar")}
        tokenizer = load_model_tokenizer(ModelConfig(path=paths["causal"]))[0]
        import transformers.models.opt.modeling_opt  # noqa: F401

        model_bytes = 0
        gc.collect()
        before = memory_status("VmRSS")
        for role in arguments.roles:
            placement = placements[role]
            load = load_scalar_head if placement.role.scalar_head else load_causal_lm
            model = load(
                ModelConfig(),
                tokenizer,
                attention="sdpa",
                path=paths["scalar" if placement.role.scalar_head else "causal"],
                put=place_sharded(build_deepspeed_config(placement, accelerator, precision, 1, 1), precision.dtype),
            )
            size = sum(parameter.ds_numel for parameter in model.parameters())
            model_bytes += 2 * size
            model = ScalarHead(model) if placement.role.scalar_head else model
            common: dict[str, Any] = {"accelerator": accelerator, "precision": precision, "placement": placement}
            if not placement.role.trained:
                model = freeze_model(model, **common)
            elif arguments.engines:
                common |= {"optimizer": OptimizerConfig(), "total_steps": 1, "micro_batch_size": 1, "accumulation": 1}
                model = TrainingEngine(role, model, **common)
                model_bytes += (4 + 8 + 2) * size  # master weights, two moments, gradients
            models.append(model)
        distributed.all_gather_objects(None)
        memory = {"before": before, "kept": model_bytes // distributed.world().size, "peak": memory_status("VmHWM")}
        Path(arguments.out, f"{distributed.world().rank}.json").write_text(json.dumps(memory))
    return 0


def memory_status(key: str) -> int:
    """Return a memory figure of this process from /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


if __name__ == "__main__":
    sys.exit(main())
