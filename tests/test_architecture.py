"""The layers: rlhf -> accelerators (public names) -> torch, and what may be imported when."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import accelerators

ROOT = Path(__file__).parent.parent
BACKENDS = {"cuda", "hpu", "xpu", "mps", "npu", "rocm"}  # "cpu" is also a place for tensors, in any backend
VENDOR_PACKAGES = {"habana_frameworks", "intel_extension_for_pytorch", "torch_npu", "pynvml", "triton"}


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(tree: ast.AST) -> Iterator[tuple[str, list[str]]]:
    """(module, names taken from it) for every import, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", [alias.name for alias in node.names]


def attributes(tree: ast.AST) -> Iterator[str]:
    """Dotted names in code: `torch.cuda.synchronize` gives itself and each of its beginnings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def words(tree: ast.AST) -> Iterator[str]:
    """Names, attributes and strings of the code; docstrings are prose and may name anything."""
    prose = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.value


@pytest.mark.parametrize("path", modules("rlhf"), ids=name_of)
def test_rlhf_uses_only_public_names_of_accelerators(path: Path) -> None:
    for module, names in imports(ast.parse(path.read_text())):
        if module.partition(".")[0] == "accelerators":
            assert module == "accelerators", f"{module} is not public"
            assert set(names) <= set(accelerators.__all__)


@pytest.mark.parametrize("path", modules("rlhf"), ids=name_of)
def test_rlhf_knows_no_backend(path: Path) -> None:
    tree = ast.parse(path.read_text())
    for module, names in imports(tree):
        assert module.partition(".")[0] not in VENDOR_PACKAGES
        assert not module.startswith(("torch.cuda", "torch.hpu", "deepspeed.accelerator"))
        assert not (module == "torch" and BACKENDS & set(names))
        assert not (module == "deepspeed" and "accelerator" in names)
    for dotted in attributes(tree):
        assert dotted not in {f"torch.{name}" for name in BACKENDS}, dotted
        assert not dotted.startswith("deepspeed.accelerator"), dotted
        assert dotted != "torch.backends", "a backend's switches belong to the backend"
    assert not BACKENDS & set(words(tree))


@pytest.mark.parametrize("path", modules("rlhf"), ids=name_of)
def test_rlhf_does_not_ask_what_kind_of_device_it_has(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            assert not any(isinstance(s, ast.Attribute) and ast.unparse(s).endswith("device.type") for s in sides)


@pytest.mark.parametrize("path", modules("accelerators"), ids=name_of)
def test_accelerators_knows_nothing_of_rlhf(path: Path) -> None:
    assert not [module for module, _ in imports(ast.parse(path.read_text())) if module.partition(".")[0] == "rlhf"]


@pytest.mark.parametrize("path", [*modules("rlhf"), *modules("accelerators")], ids=name_of)
def test_every_module_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize(
    "statement",
    [
        "import rlhf",
        "import rlhf.config, rlhf.errors, rlhf.run, rlhf.launch, rlhf.cli.app",
        "import accelerators",
        "import accelerators; accelerators.available()",
        "import accelerators; accelerators.select('cpu', environ={})",
    ],
)
def test_importing_and_choosing_load_no_heavy_library(statement: str) -> None:
    script = f"{statement}\nimport sys\nprint({{'torch', 'transformers', 'deepspeed', 'datasets'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_package_and_its_metadata_agree_on_the_version() -> None:
    import rlhf
    from rlhf.run import versions

    assert versions()["rlhf"] == rlhf.__version__
