"""The page of a certificate: complete without scripts and network, and safe whatever a device says."""

from __future__ import annotations

import re
from typing import Any

from rlhf.certify.page import render_certificate

CERTIFICATE: dict[str, Any] = {
    "accelerator": "npu",
    "provider": "rlhf-npu 1.0",
    "model": "NPU <1>",
    "rlhf": "0.1.0",
    "commit": "98af84c77deb",
    "command": "rlhf accelerators certify npu --level all",
    "size": "toy",
    "date": "2026-11-28T10:00:00+00:00",
    "passed": False,
    "levels": [
        {"level": "first-contact", "promise": "it runs", "result": "failed", "seconds": 61.0, "limit": None},
        {"level": "interface", "promise": "it keeps its word", "result": "not run", "seconds": 0.0, "limit": 600.0},
    ],
    "checks": [
        {
            "level": "first-contact",
            "check": "product",
            "expected": "products equal the CPU's",
            "result": "failed",
            "reason": "differs by 0.5 <script>",
            "seconds": 61.0,
            "facts": {"fp32": 0.5, "worst": [{"operator": "aten.mm", "ratio": 12.345678}], "empty": []},
        }
    ],
    "not run": ["explain"],
    "exceptions": [{"check": "operators", "reason": "ticket 4711", "expires": "2027-03-01", "state": "applied"}],
    "environment": {"versions": {"torch": "2.13.0"}, "limits": None},
}


def test_page_has_the_results_and_what_is_needed_to_repeat_them() -> None:
    page = render_certificate(CERTIFICATE)
    text = " ".join(re.sub(r"<[^>]*>", " ", page.partition("<body>")[2]).split())
    for part in (
        *("Certificate of npu (NPU &lt;1&gt;)", "✗ failed", "– not run", "differs by 0.5 &lt;script&gt;"),
        *("operator ratio aten.mm 12.35", "Not run: explain.", "An earlier level failed", "of at most 10:00"),
        *("rlhf accelerators certify npu --level all", "0.1.0 at 98af84c77deb", "torch 2.13.0"),
        "operators ticket 4711 2027-03-01 applied",
    ):
        assert part in text, part


def test_certificate_that_was_stopped_has_not_failed() -> None:
    checks = [CERTIFICATE["checks"][0] | {"result": "passed", "reason": ""}]
    header = render_certificate(CERTIFICATE | {"checks": checks}).partition("<header>")[2].partition("</header>")[0]
    assert "– stopped" in header and "failed" not in header


def test_records_by_name_become_a_table() -> None:
    tolerances = {"aten.mm": {"float32": 8.0}, "aten.exp": {"float32": 4.0, "bfloat16": 2.0}}
    check = CERTIFICATE["checks"][0] | {"facts": {"tolerances": tolerances, "nested": {"a": {"b": {"c": 1}}, "d": {}}}}
    page = render_certificate(CERTIFICATE | {"checks": [check]})
    cells = re.findall(r'<t[hd](?: class="number")?>([^<]*)</t[hd]>', page)
    assert cells[cells.index("aten.mm") - 3 :][:9] == [
        "",
        "float32",
        "bfloat16",
        "aten.mm",
        "8",
        "",
        "aten.exp",
        "4",
        "2",
    ]
    assert "<dt>b</dt>" in page


def test_page_refers_to_nothing_outside_of_itself_and_has_no_script() -> None:
    page = render_certificate(CERTIFICATE)
    assert "<script" not in page and "url(" not in page and "@import" not in page
    assert set(re.findall(r'(?:href|src)="([^"]{1,5})', page)) == {"data:", "#leve", "#firs", "#inte", "#repe"}
    assert "prefers-color-scheme: dark" in page and "default-src 'none'" in page
