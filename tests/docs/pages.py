"""Read the Markdown pages of the repository: their headings, links, code blocks and commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SITE = sorted((ROOT / "docs").rglob("*.md"))
"""Pages of the site."""

_PATTERNS = ("*.md", "docs/**/*.md", "example_scripts/*/*.md", "plugins/*/*.md", "ci/*/*.md")
GENERATED = ("ci/mutants/RESULTS.md", "example_scripts/smollm2/RESULTS.md")
PAGES = sorted({path for pattern in _PATTERNS for path in ROOT.glob(pattern)})
"""All pages that people read."""

_FENCE = re.compile(r"^( *)```(\S*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(<?([^)>\s]+)>?\)")


def name(page: Path) -> str:
    """Return a page's path from the root, for the names of tests."""
    return str(page.relative_to(ROOT))


def text(page: Path) -> str:
    """Return a page's text."""
    return page.read_text(encoding="utf-8")


def prose(page: Path) -> str:
    """Return a page's text without its code blocks."""
    return _FENCE.sub("", text(page))


def words(page: Path) -> str:
    """Return a page's text without code blocks, code spans, link targets and HTML comments."""
    without_code = re.sub(r"`[^`\n]+`", "", prose(page))
    return re.sub(r"<!--.*?-->|\]\([^)]*\)", "", without_code, flags=re.DOTALL)


def blocks(page: Path, *languages: str) -> list[str]:
    """Return the code blocks of a page in these languages."""
    return [block for _, language, block in _FENCE.findall(text(page)) if language in languages]


def links(page: Path) -> list[str]:
    """Return the targets of a page's links, web addresses left out."""
    targets = _LINK.findall(re.sub(r"`[^`\n]+`", "", prose(page)))
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as code hosts derive them."""
    slugs: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.+?)\s*$", prose(page), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        slug = base = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        number = 0
        while slug in slugs:
            number += 1
            slug = f"{base}-{number}"
        slugs.add(slug)
    return slugs


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the arguments of every `rlhf ...` in a page's shell blocks.

    Launchers before it (`srun`, `torchrun -m rlhf`) are left out, and so are comments, redirections and pipes.
    """
    for block in blocks(page, "bash"):
        for line in _logical_lines(block):
            yield from _arguments(line)


def mentions(page: Path) -> Iterator[list[str]]:
    """Yield the arguments of every `rlhf ...` in a page's code spans; they need not be complete."""
    for span in re.findall(r"`([^`\n]+)`", prose(page)):
        if re.match(r"(rlhf|torchrun|deepspeed|srun|mpirun|bash)( |$)", span) and "..." not in span:
            yield from _arguments(span)


def _logical_lines(block: str) -> Iterator[str]:
    """Yield the lines of a shell block; continued ones, and texts in quotes of several lines, as one."""
    line = ""
    for part in re.sub(r"\\\n\s*", " ", block).splitlines():
        line = f"{line}\n{part}" if line else part
        try:
            shlex.split(line, comments=True)
        except ValueError:
            continue
        yield line
        line = ""


def _simple_commands(line: str) -> Iterator[list[str]]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";|<>&")
    lexer.whitespace_split, lexer.commenters = True, "#"
    command: list[str] = []
    redirected = False
    for token in lexer:
        if set(token) <= set(";|&"):
            yield command
            command = []
        elif set(token) <= set("<>"):
            redirected = True
        elif redirected:
            redirected = False
        else:
            command.append(token)
    yield command


def _arguments(line: str) -> Iterator[list[str]]:
    """Yield what follows the word `rlhf` in each command of a line."""
    for command in _simple_commands(line):
        while command and re.fullmatch(r"[A-Z_]+=.*", command[0]):
            command = command[1:]
        if "example_scripts/run.sh" in command:
            recipe, *rest = command[command.index("example_scripts/run.sh") + 1 :]
            yield [] if recipe.startswith("-") else ["--config", f"example_scripts/{recipe}.yaml", *rest]
        elif command and command[0] in ("rlhf", "torchrun", "deepspeed", "srun", "mpirun") and "rlhf" in command:
            yield command[command.index("rlhf") + 1 :]
