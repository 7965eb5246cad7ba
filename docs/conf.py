"""Configure the documentation site: `python -m sphinx -W --keep-going docs build/site`."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY = os.environ.get("DOCS_REPOSITORY_URL", "").rstrip("/")  # for example https://github.com/OWNER/NAME
sys.path.insert(0, str(ROOT))

from rlhf.version import __version__  # noqa: E402

project = "rlhf"
author = copyright = "the rlhf authors"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"rlhf {release}"
html_copy_source = False
html_show_sphinx = False
myst_heading_anchors = 4
suppress_warnings = ["toc.empty_glob"]  # pages that a release may lack

# Docstrings are Google style with Markdown's `code`.
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

_OUTSIDE = re.compile(r"\[([^\]\n]+)\]\(\.\./((?:\.\./)*[^)#\s]*)(#[^)\s]*)?\)")


def _link_repository(app: Sphinx, docname: str, content: list[str]) -> None:
    """Turn links to files outside docs/ into links to the repository, or into plain text without a repository."""
    folder = (ROOT / "docs" / docname).parent

    def replace(match: re.Match[str]) -> str:
        text, path, anchor = match.groups()
        target = (folder / ".." / path).resolve()
        if target.is_relative_to(ROOT / "docs"):
            return match[0]
        if not REPOSITORY:
            return f"{text} (`{target.relative_to(ROOT)}`)" if text != str(target.relative_to(ROOT)) else f"`{text}`"
        kind = "tree" if target.is_dir() else "blob"
        return f"[{text}]({REPOSITORY}/{kind}/main/{target.relative_to(ROOT)}{anchor or ''})"

    content[0] = _OUTSIDE.sub(replace, content[0])


def _read_markdown(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Turn Markdown's code spans and indented code blocks of a docstring into reStructuredText's."""
    marked: list[str] = []
    paragraph = ""
    for line in lines:
        starts_block = line.startswith("    ") and re.match(r"[^\s:.*-]", paragraph)
        if starts_block and marked and (not marked[-1] or marked[-1].endswith(":")):
            marked += ["", "::", ""]
        if line:
            paragraph = line
        marked.append(line)
    parts = re.split(r"^(::\n\n(?:(?: {4}.*)?(?:\n|\Z))+)", "\n".join(marked), flags=re.MULTILINE)
    parts[::2] = [re.sub(r"(?<!`)`([^`]+)`(?!`)", r"\\ ``\1``\\ ", prose) for prose in parts[::2]]
    lines[:] = "".join(parts).split("\n")


def setup(app: Sphinx) -> None:
    """Register the hooks."""
    app.connect("source-read", _link_repository)
    app.connect("autodoc-process-docstring", _read_markdown)
