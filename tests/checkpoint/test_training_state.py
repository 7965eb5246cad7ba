"""Checkpoints: whole or absent on every rank, the newest two, and the error for an unreadable one."""

import os
from pathlib import Path

import pytest
import torch

from rlhf.checkpoint import training_state
from rlhf.config.schema import OptimizerConfig
from rlhf.engine import distributed
from rlhf.engine.engine import TrainingEngine
from rlhf.errors import RunError
from rlhf.models.forward import completion_log_probs
from rlhf.runs.directory import RunDirectory
from rlhf.utils.manifest import read_manifest, write_manifest
from tests.helpers import llama
from tests.in_process import make_placement

IDS = torch.randint(2, 60, (4, 12), generator=torch.Generator().manual_seed(0))


def place(folder: Path):
    return RunDirectory(folder).stage("sft")


def build(accelerator, zero_stage=1, precision="fp32", accumulation=1):
    return TrainingEngine(
        "test",
        llama(60),
        accelerator=accelerator,
        precision=accelerator.precision(precision),
        placement=make_placement(zero_stage),
        optimizer=OptimizerConfig(learning_rate=1e-2),
        total_steps=10,
        micro_batch_size=len(IDS) // accumulation,
        accumulation=accumulation,
    )


def train(engine, accumulation=1):
    def loss(model, ids):
        return -completion_log_probs(model, ids, torch.ones_like(ids), 8).log_probs.sum() / 32, {}

    engine.step(IDS.split(len(IDS) // accumulation), loss)


def names(folder):
    return sorted(path.name for path in place(folder).checkpoints.iterdir())


@pytest.fixture(scope="module")
def engine(accelerator):
    return build(accelerator)


def test_the_newest_two_are_kept(engine, tmp_path):
    for step in (1, 2, 3):
        training_state.save_checkpoint(place(tmp_path), step, {"model": engine}, {"number": step})
    assert names(tmp_path) == ["step-00000002", "step-00000003"]
    assert training_state.restore_checkpoint(place(tmp_path), {"model": engine})[:2] == (3, {"number": 3})


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_checkpoint_of_a_lazy_gaudi_is_read_elsewhere(accelerator, monkeypatch, tmp_path, zero_stage):
    """Gaudi's bridge gives `torch.save` another default in lazy mode, of which plain torch reads nothing."""
    lazy, save = build(accelerator, zero_stage), torch.save
    train(lazy)
    with monkeypatch.context() as bridge:
        bridge.setattr(torch, "save", lambda *a, pickle_protocol=4, **k: save(*a, pickle_protocol=pickle_protocol, **k))
        training_state.save_checkpoint(place(tmp_path), 1, {"model": lazy}, {}, {"torch": torch.get_rng_state()})
    restored = training_state.restore_checkpoint(place(tmp_path), {"model": build(accelerator, zero_stage)})
    assert restored.step == 1 and torch.equal(restored.random["torch"], torch.get_rng_state())


def test_unreadable_checkpoint_error_names_the_one_before(engine, tmp_path):
    for step in (1, 2):
        training_state.save_checkpoint(place(tmp_path), step, {"model": engine}, {})
    newest = place(tmp_path).latest_checkpoint
    (newest / "state.pt").write_bytes(b"cut off")
    with pytest.raises(
        RunError, match=r"step-00000002: cannot be read .*; take the one before: .* --resume=step-00000001$"
    ):
        training_state.restore_checkpoint(place(tmp_path), {"model": engine})
    newest.rename(f"{newest}.bad")
    assert training_state.restore_checkpoint(place(tmp_path), {"model": engine})[:2] == (1, {})


@pytest.mark.parametrize("key", ["state", "engines"])
def test_state_without_its_key_is_named_even_if_the_manifest_fits(engine, tmp_path, key):
    training_state.save_checkpoint(place(tmp_path), 1, {"model": engine}, {})
    checkpoint = place(tmp_path).latest_checkpoint
    content = torch.load(checkpoint / "state.pt", weights_only=True)
    del content[key]
    torch.save(content, checkpoint / "state.pt")
    write_manifest(checkpoint)
    with pytest.raises(RunError, match=rf"step-00000001: cannot be read \(state.pt has no '{key}'\)"):
        training_state.restore_checkpoint(place(tmp_path), {"model": engine})


def test_folders_of_other_names_are_no_checkpoints(engine, tmp_path):
    """They do not count, neither as the newest nor among those that are kept."""
    others = ["step-00000009.bad", "step-00000002 (copy)", "step-00000003~", "step-", "step-x", "step-00000009.partial"]
    for name in others:
        (place(tmp_path).checkpoints / name).mkdir(parents=True)
    assert place(tmp_path).latest_checkpoint is None
    for step in (1, 2, 3):
        training_state.save_checkpoint(place(tmp_path), step, {"model": engine}, {})
    assert names(tmp_path) == sorted(["step-00000002", "step-00000003", *others])
    assert training_state.restore_checkpoint(place(tmp_path), {"model": engine})[:2] == (3, {})


DAMAGES = {
    "a flipped bit": lambda data: (
        data[: len(data) // 3] + bytes([data[len(data) // 3] ^ 4]) + data[len(data) // 3 + 1 :]
    ),
    "a flipped last bit": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "half of zeros": lambda data: data[: len(data) // 2] + bytes(len(data) - len(data) // 2),
    "cut": lambda data: data[: len(data) // 2],
    "longer": lambda data: data + b"\0",
    "gone": lambda data: None,
}


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_damage_of_every_file_is_named(accelerator, zero_stage, tmp_path):
    engines = {"model": build(accelerator, zero_stage)}
    training_state.save_checkpoint(place(tmp_path), 1, engines, {"number": 1})
    checkpoint = place(tmp_path).latest_checkpoint
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    assert len(files) > 2 and checkpoint / "manifest.json" in files
    for file in files:
        intact = file.read_bytes()
        for damage in DAMAGES.values():
            damaged = damage(intact)
            file.unlink() if damaged is None else file.write_bytes(damaged)
            with pytest.raises(RunError, match=rf"step-00000001: cannot be read \({file.relative_to(checkpoint)} "):
                training_state.restore_checkpoint(place(tmp_path), engines)
            file.write_bytes(intact)
    assert training_state.restore_checkpoint(place(tmp_path), engines)[:2] == (1, {"number": 1})


@pytest.mark.parametrize("name", ["model/rank0.safetensors", "state.pt", "random-rank0.pt"])
@pytest.mark.parametrize("place_of_bit", [1e-4, 0.4, 0.9999])
def test_checkpoint_that_the_disk_damages_replaces_none(engine, tmp_path, monkeypatch, name, place_of_bit):
    """The disk flips a bit after the bytes were written and before they are read back."""
    for step in (1, 2):
        training_state.save_checkpoint(place(tmp_path), step, {"model": engine}, {"large": torch.zeros(10_000)})
    fsync = os.fsync

    def damage(descriptor):
        fsync(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if str(path).endswith(f"step-00000003.partial/{name}"):
            data = bytearray(path.read_bytes())
            data[int(len(data) * place_of_bit)] ^= 1
            path.write_bytes(data)

    monkeypatch.setattr(os, "fsync", damage)
    with pytest.raises(RunError, match=rf"{name}: the disk returns other bytes than were written to it"):
        training_state.save_checkpoint(place(tmp_path), 3, {"model": engine}, {"large": torch.zeros(10_000)})
    assert [path.name for path in place(tmp_path).all_checkpoints] == ["step-00000001", "step-00000002"]


class Malicious:
    """Pickled code, which creates a file when it is loaded."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_code_in_any_file_is_not_run(accelerator, zero_stage, tmp_path):
    """Even if the manifest fits the file."""
    engines = {"model": build(accelerator, zero_stage)}
    training_state.save_checkpoint(place(tmp_path), 1, engines, {})
    checkpoint, ran = place(tmp_path).latest_checkpoint, tmp_path / "ran"
    for file in sorted(checkpoint.rglob("*.pt")):
        intact = file.read_bytes()
        content = torch.load(file, weights_only=False)
        torch.save({"content": content, "more": Malicious(ran)}, file)
        write_manifest(checkpoint)
        with pytest.raises(RunError, match=r"step-00000001: cannot be read \(a file holds objects other than .*\)"):
            training_state.restore_checkpoint(place(tmp_path), engines)
        assert not ran.exists(), file
        torch.load(file, weights_only=False)
        assert ran.exists()  # it would have run
        ran.unlink()
        file.write_bytes(intact)


@pytest.mark.parametrize("is_cut", [True, False])
def test_error_of_the_only_checkpoint_names_no_earlier_one(engine, tmp_path, is_cut):
    training_state.save_checkpoint(place(tmp_path), 5, {"model": engine}, {})
    state = place(tmp_path).latest_checkpoint / "state.pt"
    state.write_bytes(b"cut off") if is_cut else state.unlink()
    with pytest.raises(RunError, match=r"step-00000005: cannot be read .*; there is no other"):
        training_state.restore_checkpoint(place(tmp_path), {"model": engine})


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("CUDA out of memory."), PermissionError(13, "denied")])
def test_resource_errors_do_not_blame_the_checkpoint(engine, tmp_path, monkeypatch, error):
    training_state.save_checkpoint(place(tmp_path), 1, {"model": engine}, {})

    def load(*arguments, **options):
        raise error

    monkeypatch.setattr(training_state, "load_engine", load)
    with pytest.raises(type(error)):
        training_state.restore_checkpoint(place(tmp_path), {"model": engine})


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_bf16_training_in_micro_batches_resumes_bit_for_bit(accelerator, zero_stage, tmp_path):
    settings = (accelerator, zero_stage, "bf16", 2)
    whole = build(*settings)
    train(whole, 2)
    training_state.save_checkpoint(place(tmp_path), 1, {"model": whole}, {})
    train(whole, 2)
    resumed = build(*settings)
    training_state.restore_checkpoint(place(tmp_path), {"model": resumed})
    train(resumed, 2)
    with whole.whole_weights() as expected, resumed.whole_weights() as actual:
        for name, tensor in expected.state_dict().items():
            assert torch.equal(tensor, actual.state_dict()[name]), name


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_checkpoint_resumes_in_smaller_micro_batches(accelerator, zero_stage, tmp_path):
    whole = build(accelerator, zero_stage)
    train(whole)
    training_state.save_checkpoint(place(tmp_path), 1, {"model": whole}, {})
    train(whole)
    resumed = build(accelerator, zero_stage, accumulation=2)
    training_state.restore_checkpoint(place(tmp_path), {"model": resumed})
    train(resumed, 2)
    assert resumed.steps == whole.steps == 2
    with whole.whole_weights() as expected, resumed.whole_weights() as actual:
        for name, tensor in expected.state_dict().items():
            torch.testing.assert_close(tensor, actual.state_dict()[name], rtol=1e-4, atol=1e-5, msg=name)


def test_a_rank_names_its_own_error_where_the_others_are_gone(monkeypatch):
    def gone(value):
        raise RuntimeError("connection closed by peer")

    monkeypatch.setattr(distributed, "all_gather_objects", gone)
    with pytest.raises(OSError, match="No space left"), distributed.on_all_ranks("writing"):
        raise OSError(28, "No space left on device")
    with pytest.raises(RuntimeError, match="connection closed"), distributed.on_all_ranks("writing"):
        pass


TWO_RANKS = """
import time
from pathlib import Path
import torch.distributed as dist
from rlhf.checkpoint import training_state
from rlhf.runs.directory import RunDirectory
dist.init_process_group("gloo")
rank = dist.get_rank()

def save_engine(engine, folder):
    time.sleep(0.3 * rank)  # a slow disk on the second machine
    (folder / f"rank{{rank}}.safetensors").write_text("weights")
    if rank == 1 and "step-00000004" in str(folder):
        raise OSError(28, "No space left on device")

training_state.save_engine = save_engine
training_state.fragments.read_counters = lambda engine: dict()
stage = RunDirectory(Path("{folder}")).stage("sft")
for step in (3, 4):
    try:
        training_state.save_checkpoint(stage, step, dict(model=None), dict(), dict(rank=rank))
    except BaseException as error:
        Path("{folder}", f"error{{rank}}-{{step}}").write_text(str(error))
training_state.verify_checkpoint(stage)
if rank == 1:
    (stage.latest_checkpoint / "random-rank1.pt").open("r+b").write(b"?")
try:
    training_state.verify_checkpoint(stage)
except BaseException as error:
    Path("{folder}", f"error{{rank}}-5").write_text(str(error))
dist.destroy_process_group()
"""


def test_checkpoint_is_published_once_every_rank_has_written(forks, tmp_path):
    """The first one is slow on one rank; the second fails there, and every rank knows; each rank checks its files."""
    forks.ranks(2, TWO_RANKS.format(folder=tmp_path))
    assert names(tmp_path) == ["step-00000003", "step-00000004.partial"]
    saved = place(tmp_path).latest_checkpoint
    of_ranks = {name for rank in (0, 1) for name in (f"random-rank{rank}.pt", f"model/rank{rank}.safetensors")}
    files = {path.relative_to(saved).as_posix() for path in saved.rglob("*") if path.is_file()}
    assert files - {"manifest.json"} == set(read_manifest(saved)) == of_ranks | {"state.pt"}
    assert sorted(path.name for path in tmp_path.glob("error*")) == ["error0-4", "error0-5", "error1-4", "error1-5"]
    assert "rank 1: " in (tmp_path / "error0-5").read_text()
    assert "(random-rank1.pt has other content" in (tmp_path / "error1-5").read_text()
    assert (tmp_path / "error0-4").read_text().startswith("writing the checkpoint failed on rank 1: ")
    assert "No space left" in (tmp_path / "error1-4").read_text()
