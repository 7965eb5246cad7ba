"""The device computes what the CPU computes, and its tensors behave as tensors do.

Strict mode and accounting have tests of their own; here everything is allowed.
"""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from comparison import Difference, compare
from simulated import device
from torch.nn import functional as F
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils.checkpoint import checkpoint

DTYPES = (torch.float32, torch.bfloat16)
KNOWN = Path(__file__).parent / "operators" / "known_differences.txt"

OFTEN_USED = """
    add addcdiv addcmul addmm all any arange argmax baddbmm bernoulli bmm cat chunk clamp clone contiguous cos cumsum
    diff div einsum empty eq exp expand fill floor_divide gather index_add index_put index_select isfinite item
    layer_norm lerp linalg.vector_norm log log_softmax logsumexp masked_fill masked_select matmul max mean mm mul
    multinomial nonzero norm permute pow rand_like repeat repeat_interleave reshape rsqrt scatter scatter_add select
    sigmoid sin softmax sort split sqrt squeeze stack std sub sum take_along_dim tanh tile to topk transpose tril
    unbind unsqueeze var view where zeros_like
    nn.functional.conv2d nn.functional.cross_entropy nn.functional.dropout nn.functional.embedding
    nn.functional.gelu nn.functional.linear nn.functional.logsigmoid nn.functional.mse_loss nn.functional.nll_loss
    nn.functional.pad nn.functional.rms_norm nn.functional.silu
"""


def known_differences() -> dict[tuple[str, str], str]:
    """Return the cause for each (operator, dtype) of the file, whose lines are "operator dtype: cause"."""
    lines = [line for line in KNOWN.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    pairs = [line.split(": ", 1) for line in lines]
    return {tuple(key.rsplit(" ", 1)): cause for key, cause in pairs}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", [op for op in op_db if op.name in OFTEN_USED.split()], ids=lambda op: op.full_name)
def test_often_used_operator_equals_the_cpu_in_both_directions(op: Any, dtype: torch.dtype) -> None:
    if op.supports_dtype(dtype, "cpu"):
        assert compare(op, dtype, samples=3) > 0


@pytest.mark.slow
def test_99_percent_of_pytorchs_operators_equal_the_cpu() -> None:
    compared, differ = set(), {}
    for op in op_db:
        for dtype in DTYPES:
            if op.supports_dtype(dtype, "cpu"):
                key = (op.full_name, str(dtype).removeprefix("torch."))
                try:
                    if compare(op, dtype):
                        compared.add(key)
                except Difference as difference:
                    differ[key] = str(difference)
    every = len(compared) + len(differ)
    print(f"{len(compared)} of {every} pairs of an operator and a dtype equal the CPU: {len(compared) / every:.2%}")
    known = known_differences()
    unknown = {key: difference for key, difference in differ.items() if key not in known}
    assert not unknown, f"they differ, and the file does not name them: {unknown}"
    equal = {key for key in compared & known.keys() if not known[key].startswith("rounding")}
    assert not equal, f"they are equal, and the file says that they differ: {equal}"
    assert len(compared) / every >= 0.99


def hpu(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to("hpu")


def test_tensors_are_on_the_one_device_of_the_process() -> None:
    assert str(torch.zeros(2, device="hpu").device) == "hpu:0"
    with pytest.raises(RuntimeError, match="one device a process"):
        torch.zeros(2, device="hpu:1")


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "view": lambda x: x.view(-1),
    "transpose": lambda x: x.t(),
    "slice": lambda x: x[1:, ::2],
    "select": lambda x: x[1],
    "expand": lambda x: x.unsqueeze(0).expand(3, -1, -1),
    "as_strided": lambda x: x.as_strided((2, 2), (1, 4), 1),
    "unfold": lambda x: x.unfold(1, 2, 1),
    "split": lambda x: x.split(2)[1],
    "diagonal": lambda x: x.diagonal(),
    "detach": lambda x: x.detach(),
    "view of another dtype": lambda x: x.view(torch.int32),
    "real part": lambda x: torch.view_as_complex(x.view(4, 2, 2)).real,
}


@pytest.mark.parametrize("case", VIEWS)
def test_a_view_shares_its_memory(case: str) -> None:
    x = torch.arange(16.0, device="hpu").view(4, 4)
    view = VIEWS[case](x)
    assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    x.fill_(7)
    assert (view == VIEWS[case](torch.full((4, 4), 7.0)).to("hpu")).all()


def test_in_place_operator_returns_its_tensor_with_a_new_version() -> None:
    x = hpu(3)
    before = x._version
    assert x.mul_(2) is x
    assert x._version == before + 1
    y = hpu(3).requires_grad_()
    z = y.exp()
    z.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_out_is_resized_and_returned() -> None:
    a, b = hpu(3, 4), hpu(3, 4)
    out = torch.empty(0, device="hpu")
    assert torch.add(a, b, out=out) is out
    torch.testing.assert_close(out, a + b)
    values, indices = torch.empty(0, device="hpu"), torch.empty(0, dtype=torch.long, device="hpu")
    torch.max(a, 1, out=(values, indices))
    torch.testing.assert_close(values, a.gather(1, indices[:, None])[:, 0])


def test_growing_tensor_keeps_values_and_memory_of_views() -> None:
    x = torch.arange(3.0, device="hpu")
    alias = x.view(3)
    x.resize_(100)
    x[50] = 5
    assert x[:3].tolist() == [0, 1, 2]
    assert x.untyped_storage().nbytes() == 400
    alias.add_(1)
    assert x[:3].tolist() == [1, 2, 3]


def test_set_makes_tensors_share_a_storage() -> None:
    x, y = hpu(4), torch.empty(0, device="hpu")
    y.set_(x)
    assert y.is_set_to(x)
    y.zero_()
    assert x.tolist() == [0] * 4
    z = torch.empty(0, device="hpu").set_(x.untyped_storage(), 1, (2,), (1,))
    z.fill_(3)
    assert x.tolist() == [0, 3, 3, 0]
    x.data = torch.ones(2, device="hpu")
    assert x.tolist() == [1, 1]


def test_a_storage_can_be_emptied_and_filled_again() -> None:
    x = hpu(8)
    in_use = device.memory()["in_use"]
    x.untyped_storage().resize_(0)
    assert device.memory()["in_use"] == in_use - 32
    x.untyped_storage().resize_(32)
    x.fill_(2)
    assert x.tolist() == [2] * 8


def test_memory_is_counted_and_returned() -> None:
    before = device.memory()
    device.reset_peak()
    x = torch.zeros(1000, device="hpu")
    y = x + 1
    assert device.memory()["in_use"] == before["in_use"] + 8000
    view = y[10:]
    del x, y
    assert device.memory()["in_use"] == before["in_use"] + 4000
    del view
    assert device.memory()["in_use"] == before["in_use"]
    assert device.memory()["peak"] >= before["in_use"] + 8000
    assert device.memory()["total"] == 96 << 30
    with pytest.raises(RuntimeError, match="PT_DEVMEM Allocation failed for size"):
        torch.empty(97 << 30, dtype=torch.uint8, device="hpu")


def test_a_cpu_tensor_over_the_same_memory() -> None:
    x = hpu(2, 3).t()
    same = device.to_cpu(x)
    assert same.device.type == "cpu" and same.stride() == x.stride()
    same.fill_(4)
    assert x.cpu().eq(4).all()
    back = device.from_cpu(torch.ones(3))
    assert back.device.type == "hpu" and back.tolist() == [1] * 3


def test_copies_between_devices_and_dtypes() -> None:
    x = torch.randn(3, 4)
    assert torch.equal(x.to("hpu").cpu(), x)
    assert torch.equal(x.t().to("hpu", torch.bfloat16).cpu(), x.t().bfloat16())
    y = torch.zeros(4, 3)
    y.t().copy_(x.to("hpu"))
    assert torch.equal(y.t(), x)
    complex_ = torch.randn(3, dtype=torch.complex64)
    assert torch.equal(complex_.to("hpu").conj().clone().cpu(), complex_.conj())
    assert torch.equal(complex_.to("hpu").conj().imag.cpu(), complex_.conj().imag)


def test_numbers_and_numpy_follow_pytorchs_rules() -> None:
    x = torch.ones(3, device="hpu", dtype=torch.bfloat16)
    assert (x + 1.5).dtype == torch.bfloat16
    assert (x + torch.tensor(1.5)).dtype == torch.bfloat16
    assert (x.long() * 1.5).dtype == torch.float32
    with pytest.raises(TypeError, match="can't convert hpu:0 device type tensor to numpy"):
        x.numpy()


def test_a_generator_repeats_itself_and_is_not_the_cpus() -> None:
    generator = torch.Generator(device="hpu").manual_seed(3)
    first = torch.rand(4, device="hpu", generator=generator)
    state = generator.get_state()
    second = torch.randn(4, device="hpu", generator=generator)
    generator.set_state(state)
    assert torch.equal(torch.randn(4, device="hpu", generator=generator), second)
    assert torch.equal(torch.rand(4, device="hpu", generator=generator.manual_seed(3)), first)

    default, cpu = device.default_generator(), torch.get_rng_state()
    default.manual_seed(5)
    drawn = [
        torch.rand(4, device="hpu"),
        F.dropout(hpu_ones := torch.ones(64, device="hpu")),
        torch.randperm(9, device="hpu"),
    ]
    drawn += torch.native_dropout(hpu_ones, 0.5, True)
    default.manual_seed(5)
    again = [torch.rand(4, device="hpu"), F.dropout(hpu_ones), torch.randperm(9, device="hpu")]
    again += torch.native_dropout(hpu_ones, 0.5, True)
    assert all(torch.equal(a, b) for a, b in zip(drawn, again))
    assert torch.equal(torch.get_rng_state(), cpu)


def test_autocast_lowers_products_and_keeps_what_needs_precision() -> None:
    x, weight = hpu(4, 4), hpu(4, 4).requires_grad_()
    with torch.autocast("hpu", dtype=torch.bfloat16):
        product = F.linear(x, weight)
        assert product.dtype == torch.bfloat16
        assert (x @ weight).dtype == torch.bfloat16
        assert F.conv1d(x[None], weight[..., None]).dtype == torch.bfloat16
        assert product.softmax(-1).dtype == F.layer_norm(product, (4,)).dtype == torch.float32
        assert F.cross_entropy(product, torch.zeros(4, dtype=torch.long, device="hpu")).dtype == torch.float32
        assert torch.cat([product, x]).dtype == torch.float32
        assert (product + product).dtype == torch.bfloat16
        with torch.autocast("hpu", enabled=False):
            assert (x @ weight).dtype == torch.float32
    product.float().sum().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.float32


def test_checkpointing_with_dropout_recomputes_same_gradients() -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 8)).to("hpu")
    x = hpu(4, 8)
    gradients = []
    for run in (
        layer,
        lambda x: checkpoint(layer, x, use_reentrant=False),
        lambda x: checkpoint(layer, x, use_reentrant=True),
    ):
        layer.zero_grad()
        device.default_generator().manual_seed(1)
        run(x.clone().requires_grad_()).sum().backward()
        gradients.append(layer[0].weight.grad.clone())
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])


def test_a_training_step_equals_the_cpus() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.LazyLinear(4)
    )
    x, labels = torch.randn(5, 3, 6, 6), torch.tensor([0, 1, 2, 3, 0])
    model(x)
    states = {}
    for where, foreach in (("cpu", False), ("hpu", False), ("hpu", True)):
        copied = copy.deepcopy(model).to(where)
        optimizer = torch.optim.AdamW(copied.parameters(), lr=1e-2, foreach=foreach)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(copied(x.to(where)), labels.to(where)).backward()
            torch.nn.utils.clip_grad_norm_(copied.parameters(), 1.0)
            optimizer.step()
        states[where, foreach] = [value.cpu() for value in copied.state_dict().values()]
    torch.testing.assert_close(states["hpu", False], states["cpu", False])
    torch.testing.assert_close(states["hpu", True], states["cpu", False])


def test_attention_consists_of_operators_and_equals_the_cpus() -> None:
    q, k, v = torch.randn(3, 2, 4, 5, 8).unbind()
    device.reset()
    output = F.scaled_dot_product_attention(q.to("hpu"), k.to("hpu"), v.to("hpu"), is_causal=True)
    assert device.counts()["operators"] > 1
    torch.testing.assert_close(output.cpu(), F.scaled_dot_product_attention(q, k, v, is_causal=True))


def test_pinned_memory() -> None:
    x = torch.randn(8)
    pinned = x.pin_memory()
    assert not x.is_pinned()
    assert pinned.is_pinned() and pinned[3:].is_pinned()
    assert torch.equal(pinned.to("hpu", non_blocking=True).cpu(), x)
    assert torch.empty(4, pin_memory=True).is_pinned()


def test_saving_and_loading(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    state = {"weight": hpu(3, 4), "view": hpu(5)[2:]}
    for kept_on, loaded_on in (("hpu", "hpu"), ("hpu", "cpu"), ("cpu", "hpu")):
        file = io.BytesIO()
        torch.save({name: value.to(kept_on) for name, value in state.items()}, file)
        file.seek(0)
        loaded = torch.load(file, map_location=loaded_on, weights_only=True)
        assert {value.device.type for value in loaded.values()} == {loaded_on}
        assert all(torch.equal(loaded[name].cpu(), state[name].cpu()) for name in state)
    safetensors.save_file({name: value.contiguous() for name, value in state.items()}, tmp_path / "weights")
    read = safetensors.load_file(tmp_path / "weights", device="hpu")
    assert all(torch.equal(read[name], state[name]) for name in state)
    assert torch.equal(copy.deepcopy(state["weight"]), state["weight"])


def test_events_and_streams() -> None:
    begin, end = (torch.Event(device="hpu", enable_timing=True) for _ in range(2))
    begin.record()
    with torch.Stream(device="hpu"):
        x = hpu(16, 16) @ hpu(16, 16)
    end.record()
    end.synchronize()
    assert end.query() and begin.elapsed_time(end) >= 0
    x.record_stream(torch.Stream(device="hpu"))


def test_there_are_only_dense_tensors() -> None:
    with pytest.raises(RuntimeError, match="the simulated Gaudi has dense tensors only"):
        hpu(3, 3).to_sparse()


ENDS_AFTER_A_BACKWARD = """
import torch
from gaudi_sim.build import load
load()
model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(20))).to("hpu")
model(torch.randn(4, 16, device="hpu")).sum().backward()
"""


ENDS_AFTER_A_BACKWARD_IN_A_THREAD = """
import gaudi_sim, threading, torch
gaudi_sim.install()
import habana_frameworks.torch
model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(20))).to("hpu")
thread = threading.Thread(target=lambda: model(torch.randn(4, 16, device="hpu")).sum().backward())
thread.start()
thread.join()
"""


def ends(times: int, program: str) -> list[str]:
    """What the processes printed that did not end well after a backward."""

    def run(_: int) -> subprocess.CompletedProcess[str]:
        root = Path(__file__).parents[1]
        environment = os.environ | {"RANK": "1"}  # the first rank says that it is a simulation
        command = [sys.executable, "-c", program]
        return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)

    with ThreadPoolExecutor(2) as pool:
        return [done.stderr for done in pool.map(run, range(times)) if done.returncode or done.stderr]


@pytest.mark.parametrize("program", [ENDS_AFTER_A_BACKWARD, ENDS_AFTER_A_BACKWARD_IN_A_THREAD], ids=["main", "thread"])
@pytest.mark.parametrize("times", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_processes_that_end_after_a_backward_end_well(times: int, program: str) -> None:
    assert ends(times, program) == []
