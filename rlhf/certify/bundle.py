"""The file that users send: the report, the environment and the logs, without secrets.

Secrets are kept out three times: processes of checks do not get them, only variables with listed prefixes are
recorded, and every text is searched for them before it is written.
"""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SECRET = re.compile(r"TOKEN(?!IZER)|(?<!_P)KEY|SECRET|(?<!BY)PASS(?!ES)|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
"""Names of variables whose values are never written; InfiniBand's PKEY and a compiler's PASSES are settings."""

_USER_OF_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_SHORTEST_SECRET = 6  # characters: shorter values are words that logs contain anyway
_LONGEST_LOG = 2**20


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are not secret by their names."""
    return {name: value for name, value in environ.items() if not SECRET.search(name)}


class Redactor:
    """Removes from texts the values of secret variables, users of URLs, and the path of the home folder."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        secrets = {value for name, value in environ.items() if SECRET.search(name) and len(value) >= _SHORTEST_SECRET}
        self._secrets = sorted(secrets, key=len, reverse=True)
        self._home = environ.get("HOME", "").rstrip("/")

    def clean(self, text: str) -> str:
        """Return the text without secrets."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        text = _USER_OF_URL.sub("***", text)
        return re.sub(rf"(?<![\w./-]){re.escape(self._home)}(?=/|\b)", "~", text) if self._home else text

    def clean_values(self, value: Any) -> Any:
        """Return a JSON value with cleaned texts. In encoded JSON, a secret with escaped letters would not be found."""
        if isinstance(value, Mapping):
            return {self.clean(key): self.clean_values(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.clean_values(item) for item in value]
        return self.clean(value) if isinstance(value, str) else value


def write_bundle(path: Path, report: Mapping[str, Any], environment: Mapping[str, Any], logs: Path) -> None:
    """Write the report, the environment and the files of the folder `logs` into one zip file.

    Raises:
        OSError: the file cannot be written.
    """
    redactor = Redactor(os.environ)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bundle:
        for name, document in (("report.json", report), ("environment.json", environment)):
            bundle.writestr(name, json.dumps(redactor.clean_values(document), indent=2) + "\n")
        for log in sorted(logs.glob("*.log")):
            text = log.read_text(encoding="utf-8", errors="replace")
            if len(text) > _LONGEST_LOG:
                text = f"{text[: _LONGEST_LOG // 2]}\n[...]\n{text[-_LONGEST_LOG // 2 :]}"
            bundle.writestr(f"logs/{log.name}", redactor.clean(text))
