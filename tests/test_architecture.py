"""The layers: rlhf -> accelerators (public names) -> torch, and what may be imported when."""

import ast
import functools
import importlib
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PUBLIC = {"accelerators", "accelerators.testing"}
# In any spelling (CudaGraph, use_cuda), and as whole words if other words contain them (output, input).
VENDORS = re.compile(
    r"cuda|cudnn|cublas|nvidia|nvml|nccl|habana|gaudi|synapse|hccl|rocm|oneccl|ascend|graphcore|mark_step"
    r"|\b(?:is_|use_|on_)?(?:hpu|xpu|npu|mps|tpu|mlu|ipu|hip|gpu)s?\b",
    re.IGNORECASE,
)
VENDOR_PACKAGES = {"intel_extension_for_pytorch", "torch_npu", "torch_xla", "triton", "apex", "bitsandbytes", "optimum"}


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """Return all nodes of a file's syntax tree, the module first."""
    return list(ast.walk(ast.parse(path.read_text())))


def imports(path: Path) -> Iterator[tuple[str, list[str]]]:
    """(module, names taken from it) for every import, wherever it stands."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", [alias.name for alias in node.names]


def imported_files(path: Path, root: Path, files: dict[str, Path]) -> set[str]:
    """Return those of `files` (by module) that the file `path` below `root` imports: anywhere in it, for types too."""
    package = [*path.relative_to(root).parent.parts]
    names: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            names |= {name if (name := f"{module}.{alias.name}") in files else module for alias in node.names}
    return names & files.keys()


def files_by_module(root: Path, *packages: str) -> dict[str, Path]:
    paths = [path for package in packages for path in (root / package).rglob("*.py")]
    return {".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def cycle(root: Path, *packages: str) -> list[str]:
    """Return modules of packages in the folder `root` that import one another in a ring; empty if none do."""
    files = files_by_module(root, *packages)
    graph = {module: imported_files(path, root, files) - {module} for module, path in files.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


# From the command line down: a package imports only from packages further down this list.
PACKAGES = (
    *("cli", "certify", "lockstep", "api", "serving", "replay", "contrib", "trainers", "rollouts", "evaluation"),
    *("memory", "generation", "checkpoint", "data", "engine", "models", "export", "report", "diagnosis", "reporting"),
    *("runs", "losses", "roles", "rewards", "config", "launchers", "utils"),
)
LOOSE = {"__init__", "__main__", "errors", "version"}


def arrows_up(root: Path) -> list[str]:
    """Return the imports in `root`/rlhf of a package by one further down `PACKAGES`."""
    files = files_by_module(root, "rlhf")
    positions = {package: position for position, package in enumerate(PACKAGES)}
    arrows = []
    for module, path in files.items():
        package = path.relative_to(root / "rlhf").parts[0].removesuffix(".py")
        for target in imported_files(path, root, files):
            other = [*target.split("."), "__init__"][1]
            if package not in LOOSE and other not in LOOSE and positions[other] < positions[package]:
                arrows.append(f"{module} -> {target}")
    return sorted(arrows)


@functools.cache
def attributes(path: Path) -> set[str]:
    """Dotted names in code: `torch.cuda.synchronize` gives itself and each of its beginnings."""
    return {ast.unparse(node) for node in nodes(path) if isinstance(node, ast.Attribute)}


def code_words(path: Path) -> Iterator[str]:
    """Names, attributes and strings of the code, without docstrings."""
    prose = {
        id(node.body[0].value)
        for node in nodes(path)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in nodes(path):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.value


def test_rlhf_uses_only_public_names_of_accelerators() -> None:
    for path in modules("rlhf"):
        for module, names in imports(path):
            if module.partition(".")[0] == "accelerators":
                assert module in PUBLIC, f"{path}: {module} is not public"
                assert set(names) <= {*importlib.import_module(module).__all__, "testing"}, path


def test_no_backend_and_no_vendor_is_named_in_rlhf() -> None:
    """Not in code, comments, documentation or recipes; a flag of another program has the name that it has."""
    paths = [path for path in sorted((ROOT / "rlhf").rglob("*")) if path.suffix in {".py", ".yaml"}]
    lines = [f"{path}: {line}" for path in paths for line in path.read_text().splitlines()]
    assert [line for line in lines if VENDORS.search(line.replace("--num-gpus", "").removeprefix(str(ROOT)))] == []


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("torch.cuda.synchronize()", True),
        ("if is_hpu():", True),
        ("CudaGraph(fn)", True),
        ("htcore.mark_step()", True),
        ("self.output", False),
        ("the compute of shapes", False),
    ],
)
def test_vendor_names_match_in_any_spelling(line: str, named: bool) -> None:
    assert bool(VENDORS.search(line)) == named


def test_rlhf_talks_to_no_device_past_the_interface() -> None:
    for path in modules("rlhf"):
        for module, names in imports(path):
            assert module.partition(".")[0] not in VENDOR_PACKAGES, path
            assert not module.startswith(("torch.accelerator", "torch.backends", "deepspeed.accelerator")), path
            assert not (module == "torch" and {"accelerator", "backends"} & set(names)), path
            assert not (module == "deepspeed" and "accelerator" in names), path
            assert "get_accelerator" not in names, path
        for dotted in attributes(path):
            assert dotted not in {"torch.accelerator", "torch.backends", "deepspeed.accelerator"}, path
            assert not dotted.endswith("get_accelerator"), path


def test_rlhf_does_not_ask_what_kind_of_device_it_has() -> None:
    for path in modules("rlhf"):
        for dotted in attributes(path):
            assert not re.search(r"device(\(\))?\.(type|index)$", dotted), f"{path}: {dotted}"
            if dotted != "event.device_type":
                assert not dotted.endswith((".is_cpu", ".device_name", ".device_type")), f"{path}: {dotted}"
        assert "cpu" not in set(code_words(path)), f"{path}: a device is named only by the one who chooses it"


def test_accelerators_knows_nothing_of_rlhf() -> None:
    importers = [
        path for path in modules("accelerators") for module, _ in imports(path) if module.partition(".")[0] == "rlhf"
    ]
    assert importers == []


def test_every_module_says_what_it_is_for() -> None:
    paths = [*modules("rlhf"), *modules("accelerators")]
    assert [path for path in paths if not ast.get_docstring(nodes(path)[0])] == []  # type: ignore[arg-type]


PLUGINS = sorted(path.parent for path in (ROOT / "plugins").glob("*/*/__init__.py"))


def test_no_files_import_one_another_in_a_ring() -> None:
    assert not cycle(ROOT, "rlhf", "accelerators")
    assert len(PLUGINS) > 1
    for package in PLUGINS:
        assert not cycle(package.parent, package.name)


def test_packages_equal_the_list_and_no_other_module_is_loose() -> None:
    folders = {path.name for path in (ROOT / "rlhf").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == set(PACKAGES)
    assert {path.stem for path in (ROOT / "rlhf").glob("*.py")} == LOOSE


def test_packages_import_downwards() -> None:
    assert not arrows_up(ROOT)


@pytest.mark.parametrize(
    "statement",
    ["from rlhf.trainers import run", "def f():\n    import rlhf.trainers.run", "from ..trainers import run"],
)
def test_arrows_up_are_noticed(tmp_path: Path, statement: str) -> None:
    for name, text in {"trainers/run.py": "", "models/loading.py": statement, "cli/app.py": statement}.items():
        (tmp_path / "rlhf" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "rlhf" / name).write_text(text)
    assert arrows_up(tmp_path) == ["rlhf.models.loading -> rlhf.trainers.run"]


@pytest.mark.parametrize(
    ("first", "second", "ring"),
    [
        ("import pack.second", "import os", False),
        ("import pack.second", "from pack import first", True),
        ("from pack.second import thing", "def f():\n    from pack.first import thing", True),
        ("from pack import second", "if TYPE_CHECKING:\n    from .first import Thing", True),
        ("from . import second", "import pack.first as one", True),
        ("from pack.second import thing", "from pack import thing", False),
    ],
)
def test_a_ring_is_seen_however_it_is_made(tmp_path: Path, first: str, second: str, ring: bool) -> None:
    (tmp_path / "pack").mkdir()
    for name, text in {"__init__": "", "first": first, "second": second}.items():
        (tmp_path / f"pack/{name}.py").write_text(text)
    assert bool(cycle(tmp_path, "pack")) == ring


LONG = re.compile(r"\A(?:\s|\"\"\".*?\"\"\")*(?:#|//|/\*)\s*Long: \w", re.DOTALL)
"""A file whose first comment, after the docstring if there is one, gives the reason for its length."""


def test_long_files_give_a_reason() -> None:
    """A file should fit into a reader's head: a warning from 500 lines, an error from 800 lines without a reason."""
    listed = subprocess.run(
        ["git", "ls-files", "*.py", "*.c", "*.cpp", "*.h"], cwd=ROOT, capture_output=True, text=True
    )
    paths = [ROOT / line for line in listed.stdout.splitlines()] or [*modules("rlhf"), *modules("accelerators")]
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths if path.is_file()}
    long = {name: lines for name, text in texts.items() if (lines := text.count("\n")) > 500}
    for name, lines in long.items():
        if not LONG.match(texts[name]):
            warnings.warn(f"{name} has {lines} lines: split it where its subject divides", stacklevel=1)
    assert not {name: lines for name, lines in long.items() if lines > 800 and not LONG.match(texts[name])}


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("# Long: one table\n", True),
        ('"""A module.\n\nMore.\n"""\n\n# Long: one table\n', True),
        ("/* Long: one table */\n", True),
        ("# Other\n# Long: one table\n", False),
        ("import os\n# Long: one table\n", False),
        ("# Long:\n", False),
    ],
)
def test_reason_for_length_is_the_first_comment(text: str, given: bool) -> None:
    assert bool(LONG.match(text)) == given


def test_importing_and_choosing_load_no_heavy_library() -> None:
    script = (
        "import sys, accelerators, rlhf.config.schema, rlhf.runs.directory, rlhf.trainers.run, rlhf.cli.app\n"
        "accelerators.available()\n"
        "accelerators.select('cpu', environ={})\n"
        "print({'torch', 'transformers', 'deepspeed', 'datasets'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_importing_the_stages_loads_no_library_that_few_runs_need() -> None:
    script = (
        "import sys, accelerators, rlhf.trainers.pipeline\n"
        "print({'datasets', 'pandas', 'peft', 'pyarrow', 'scipy', 'torchvision', 'vllm'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_the_package_and_its_metadata_agree_on_the_version() -> None:
    import rlhf
    from rlhf.runs.directory import collect_versions

    assert collect_versions()["rlhf"] == rlhf.__version__
