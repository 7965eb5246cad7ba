"""`rlhf accelerators`: which backends are installed, and what one of them can do here.

`list` reports on every plugin, broken ones too, and imports no torch; `explain` creates a backend and asks it;
`check` runs the conformance kit.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

import accelerators
from accelerators import OPERATIONS, AcceleratorError, KernelImpl, PluginError, Report, Support
from rlhf.cli.check import check
from rlhf.cli.tables import print_json, print_table
from rlhf.utils.units import format_bytes

if TYPE_CHECKING:
    from accelerators import Accelerator

app = typer.Typer(
    no_args_is_help=True,
    help="Show and check the installed accelerator backends. RLHF_PLUGINS limits the plugins that are loaded: names of "
    "distributions or entry points, with commas between, or none for the built-in backends alone.",
)

AsJSON = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_backends(as_json: AsJSON = False) -> None:
    """List every backend and every plugin that could not be used, with the reason."""
    reports = accelerators.available()
    if as_json:
        print_json([_listed(report) for report in reports])
        return
    columns = ("name", "state", "devices", "priority", "provided by", "reason")
    print_table("Accelerators", columns, [_row(report) for report in reports])


@app.command()
def explain(
    name: Annotated[str, typer.Argument(help="Backend; auto: the one that a run would take.")] = "auto",
    as_json: AsJSON = False,
) -> None:
    """Explain what a backend can do on this machine, and why not what it cannot."""
    with accelerators.stdout_to_stderr():  # a device's software may print while it is opened
        facts = _explained(name)
    if as_json:
        print_json(facts)
    else:
        _print_facts(facts)


app.command()(check)


def _listed(report: Report) -> dict[str, Any]:
    return {
        "name": report.name,
        "available": report.available,
        "present": report.available or (report.probe is not None and report.probe.present),
        "broken": report.error is not None,
        "devices": report.probe.count if report.probe else 0,
        "model": report.probe.model if report.probe else "",
        "priority": report.priority,
        "distribution": report.distribution,
        "version": report.version,
        "reason": report.error or report.reason,
        "warning": report.warning,
    }


def _row(report: Report) -> tuple[str, ...]:
    present = report.probe is not None and report.probe.present
    state = "available" if report.available else "broken" if report.error else "not available"
    priority = "" if report.priority is None else str(report.priority)
    warning = f" (warning: it {report.warning})" if report.warning else ""
    reason = f"{'present, but ' if present else ''}{report.error or report.reason}{warning}"
    return report.name, state, report.devices, priority, report.provider, reason


def _explained(name: str) -> dict[str, Any]:
    environ = {key: value for key, value in os.environ.items() if name == "auto" or key != "RLHF_ACCELERATOR"}
    selection = accelerators.select(name, environ=environ)
    selection.export(os.environ)
    accelerator = selection.create()
    chosen = {"name": selection.name, "provider": selection.provider, "reason": selection.reason}
    accelerator.bind(0)
    deepspeed = accelerator.prepare_deepspeed()
    return chosen | _facts(accelerator) | {"deepspeed": asdict(deepspeed)}


def _facts(accelerator: Accelerator) -> dict[str, Any]:
    for operation in OPERATIONS:
        accelerator.kernels.get(operation)  # what cannot be made is found out only so
    return {
        "device": asdict(accelerator.info()),
        "precisions": {wish: _precision(accelerator, wish) for wish in ("auto", "bf16", "fp16", "fp32")},
        "operations": {
            operation: _operation(accelerator, operation, support)
            for operation, support in accelerator.kernels.capabilities().items()
        },
        "memory": asdict(accelerator.memory()),
        "shapes": asdict(accelerator.shape_policy()),
        "lazy": accelerator.is_lazy(),
        "dist_backend": accelerator.dist_backend(),
    }


def _precision(accelerator: Accelerator, wish: str) -> dict[str, Any]:
    try:
        precision = accelerator.precision(wish)
    except PluginError:
        raise
    except AcceleratorError as error:
        return {"ok": False, "name": wish, "reason": str(error)}
    return {"ok": True, "name": precision.name, "reason": precision.reason}


def _operation(accelerator: Accelerator, operation: str, support: Support) -> dict[str, Any]:
    """Return whether an operation is available, and its implementations."""
    return asdict(support) | {"candidates": _candidates(accelerator.kernels.candidates(operation))}


def _candidates(ranked: Sequence[tuple[KernelImpl, Support]]) -> list[dict[str, Any]]:
    """Every implementation, best first, with why it was taken or not."""
    listed = []
    for place, (implementation, support) in enumerate(ranked):
        beaten = place > 0 and support.ok
        reason = f"{ranked[0][0].name} has the higher priority" if beaten else support.reason
        if beaten and implementation.operation == "attention":
            reason += "; this one is for models that it does not serve"
        listed.append(
            {
                "name": implementation.name,
                "priority": implementation.priority,
                "ok": support.ok,
                "used": place == 0 and support.ok,
                "reason": reason,
            }
        )
    return listed


def _print_facts(facts: dict[str, Any]) -> None:
    device, memory, shapes, deepspeed = facts["device"], facts["memory"], facts["shapes"], facts["deepspeed"]
    rows = [
        ("chosen", facts["reason"]),
        ("provided by", facts["provider"]),
        ("device", f"{device['count']} x {device['model']}, {device['software']}"),
        *((("arithmetic", _peaks(device["peak_flops"])),) if device["peak_flops"] else ()),
        ("memory", f"{format_bytes(memory['total'])}, of which this process uses {format_bytes(memory['allocated'])}"),
        ("shapes", shapes["kind"]),
        ("execution", "lazy" if facts["lazy"] else "eager"),
        ("between processes", facts["dist_backend"]),
        (
            f"DeepSpeed {deepspeed['version']}",
            f"{deepspeed['implementation']}: device {deepspeed['device']}, {deepspeed['communication']} between "
            f"processes, trains in {', '.join(deepspeed['dtypes'])}",
        ),
    ]
    print_table(facts["name"], ("what", "here"), rows)
    precisions = [
        (wish, found["name"] if found["ok"] else "no", found["reason"]) for wish, found in facts["precisions"].items()
    ]
    print_table("Precisions", ("wish", "used", "reason"), precisions)
    operations = []
    for operation, support in facts["operations"].items():
        for found in support["candidates"] or [support | {"name": "", "used": False}]:
            operations.append((operation, found["name"], "yes" if found["used"] else "no", found["reason"]))
    print_table("Operations", ("operation", "implementation", "used", "reason"), operations)


def _peaks(stated: dict[str, float]) -> str:
    """Return the maker's peak rates, as 989 TFLOP/s in bf16."""
    return f"at most {', '.join(f'{peak / 1e12:,.0f} TFLOP/s in {name}' for name, peak in stated.items())}"
