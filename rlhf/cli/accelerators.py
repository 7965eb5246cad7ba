"""`rlhf accelerators`: the installed backends, and what each can do on this machine.

`list` reports on every plugin, broken ones too, and imports no torch; `explain` creates a backend and asks it;
`check` runs the conformance kit, and `certify` the levels of a certificate, with a page and a bundle to send.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import accelerators
from accelerators import OPERATIONS, AcceleratorError, PluginError, Report
from rlhf.cli.diff import diff
from rlhf.cli.options import report_interruption
from rlhf.cli.outcome import BAD_RESULT
from rlhf.cli.tables import AsJSON, AsTSV, print_json, print_line, print_table
from rlhf.errors import ConfigError
from rlhf.utils.process_info import current_process
from rlhf.utils.units import format_bytes

if TYPE_CHECKING:
    from accelerators import Accelerator

app = typer.Typer(
    no_args_is_help=True,
    help="Show and check the installed accelerator backends. RLHF_PLUGINS limits the plugins that are loaded: names of "
    "distributions or entry points, separated by commas, or none for the built-in backends only.",
)


app.command()(diff)


@app.command("list")
def list_backends(as_json: AsJSON = False, as_tsv: AsTSV = False) -> None:
    """List every backend, and every plugin that could not be used, with the reason."""
    reports = accelerators.available()
    if as_json:
        print_json([_describe_report(report) for report in reports])
        return
    columns = ("name", "state", "devices", "priority", "provided by", "reason")
    print_table("Accelerators", columns, [_row(report) for report in reports], tsv=as_tsv)


@app.command()
def explain(
    name: Annotated[str, typer.Argument(help="Backend; auto: the one that a run would use.")] = "auto",
    as_json: AsJSON = False,
    as_tsv: AsTSV = False,
) -> None:
    """Explain what a backend can do on this machine, and why it cannot do the rest."""
    with accelerators.stdout_to_stderr():  # a device's software may print while it is opened
        facts = _explain(name)
    if as_json:
        print_json(facts)
    else:
        _print_facts(facts, as_tsv)


@app.command()
def check(
    name: Annotated[str, typer.Argument(help="Backend; auto: the one that a run would use.")],
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="CHECK", help="Run only this check. Repeatable.")
    ] = None,
    as_json: AsJSON = False,
    as_tsv: AsTSV = False,
) -> None:
    """Check that a backend keeps the promises of the accelerator interface, on this machine.

    The checks cover discovery, precisions, kernels, memory, random numbers, graph capture, collectives, DeepSpeed at
    every ZeRO stage, and a tiny run of the three stages. A plugin's own tests can inherit the same checks from
    [bold]accelerators.testing.Conformance[/].

    Exit code 0: no check failed; 3: at least one failed; 2: the checks could not run.
    """
    from accelerators import testing

    def report_progress(text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()

    with accelerators.stdout_to_stderr():  # a device's software may print at any time
        results = testing.run(
            name,
            only or (),
            started=lambda check: report_progress(f"{check:24}"),
            finished=lambda result: report_progress(f"{result.result} {result.seconds:.1f} s\n"),
        )
    if as_json:
        print_json([asdict(result) for result in results])
    else:
        rows = [(row.check, row.result, f"{row.seconds:.1f}", row.title, row.reason) for row in results]
        print_table(f"Conformance of {name}", ("check", "result", "seconds", "what", "reason"), rows, tsv=as_tsv)
    counts = Counter(result.result for result in results)
    if not (as_json or as_tsv):
        verdict = "does not conform" if counts["failed"] else "" if only else "conforms"
        numbers = ", ".join(f"{counts[result]} {result}" for result in ("passed", "skipped", "failed"))
        print_line(f"{name}: {numbers}{verdict and f'; it {verdict} to the accelerator interface'}")
    if counts["failed"]:
        raise typer.Exit(BAD_RESULT)


@app.command()
def certify(
    name: Annotated[str, typer.Argument(help="Backend; auto: the one that a run would use.")],
    level: Annotated[
        str | None, typer.Option(help="One level, or all; default: first-contact.", show_default=False)
    ] = None,
    up_to: Annotated[
        str | None, typer.Option(help="The last level; those before it are included.", metavar="LEVEL")
    ] = None,
    size: Annotated[
        Literal["full", "toy"], typer.Option(help="Sizes of models: full for a device, toy for a test on a CPU.")
    ] = "full",
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="CHECK", help="Run only this check. Repeatable.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder; default: rlhf-certify-NAME-TIME here.", metavar="FOLDER")
    ] = None,
    as_json: AsJSON = False,
) -> None:
    """Certify a device, level by level, with a certificate that you can send.

    [bold]first-contact[/]  the first hour: ten checks, from a matrix product to twenty PPO steps

    [bold]interface[/]      the conformance kit, as [bold]rlhf accelerators check[/]

    [bold]numerics[/]       every operator that training uses, compared with float64

    [bold]learning[/]       a hundred steps of every stage, compared with golden numbers

    [bold]endurance[/]      a killed run, full memory, two ranks, ZeRO 0 to 3, and many steps

    Each level is a gate: the command stops at the first check that fails. After the first contact, a level takes at
    most ten minutes on a device, and thirty on a CPU or at toy size. Each check states what it expects, and runs in
    separate processes. The command needs no network, no data and no weights.

    [bold]rlhf accelerators certify auto[/]                  [dim]# the first contact, on this device[/]

    [bold]rlhf accelerators certify NAME --level all[/]      [dim]# everything[/]

    [bold]rlhf accelerators certify NAME --only attention[/] [dim]# one check again[/]

    [bold]rlhf accelerators certify cpu --size toy[/]        [dim]# some minutes on a CPU[/]

    The folder gets [bold]certificate.html[/], a page to read; [bold]certificate.json[/], with all numbers and what is
    needed to repeat them; and [bold]bundle.zip[/], with the log of each check. They contain no tokens, keys or
    passwords: secret variables are neither recorded nor visible to the checks.

    Exit code 0: all checks passed; 3: one failed, and the certificate is still written; 2: they could not start.
    """
    from rlhf.certify import runner

    if launcher := current_process().launcher:
        raise ConfigError(f"rlhf accelerators certify starts its ranks itself; start it without {launcher}")

    def report_progress(line: str) -> None:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()

    with report_interruption():
        report, folder = runner.certify(
            name,
            level=level,
            up_to=up_to,
            size=size,
            only=only or (),
            output=output,
            report_progress=report_progress,
        )
    if as_json:
        print_json(report | {"folder": str(folder)})
    else:
        print_line(_summarize_certificate(report), f"; certificate: {folder / 'certificate.html'}")
    if not report["passed"]:
        raise typer.Exit(BAD_RESULT)


def _summarize_certificate(report: dict[str, Any]) -> str:
    """Return one line: the device, and the checks that passed, or the one that failed."""
    checks = report["checks"]
    subject = f"{report['accelerator']} ({report['model']})" if report["model"] else report["accelerator"]
    if report["passed"]:
        return f"{subject}: {len(checks)} checks passed in {sum(check['seconds'] for check in checks):.0f} s"
    return f"{subject}: {checks[-1]['check']} failed after {len(checks) - 1} checks passed: {checks[-1]['reason']}"


def _describe_report(report: Report) -> dict[str, Any]:
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


def _explain(name: str) -> dict[str, Any]:
    environ = {key: value for key, value in os.environ.items() if name == "auto" or key != "RLHF_ACCELERATOR"}
    selection = accelerators.select(name, environ=environ)
    selection.export(os.environ)
    accelerator = selection.create()
    accelerator.bind(0)
    deepspeed = accelerator.prepare_deepspeed()
    for operation in OPERATIONS:
        accelerator.kernels.get(operation)  # some kernels only fail when they are built
    return {
        "name": selection.name,
        "provider": selection.provider,
        "reason": selection.reason,
        "device": asdict(accelerator.info()),
        "precisions": {wish: _precision(accelerator, wish) for wish in ("auto", "bf16", "fp16", "fp32")},
        "operations": {
            operation: asdict(support) | {"candidates": _candidates(accelerator, operation)}
            for operation, support in accelerator.kernels.capabilities().items()
        },
        "memory": asdict(accelerator.memory()),
        "health": asdict(accelerator.health()),
        "allocator": _describe_allocator(accelerator),
        "shapes": asdict(accelerator.shape_policy()),
        "lazy": accelerator.is_lazy(),
        "dist_backend": accelerator.dist_backend(),
        "deepspeed": asdict(deepspeed),
    }


def _describe_allocator(accelerator: Accelerator) -> str:
    """Return the variable of the device's allocator with its value; "" if the backend names none."""
    variable, value = accelerator.allocator_setting
    if not variable:
        return ""
    return f"{variable}={os.environ[variable]}" if variable in os.environ else f"{variable} is not set, e.g. to {value}"


def _precision(accelerator: Accelerator, wish: str) -> dict[str, Any]:
    try:
        precision = accelerator.precision(wish)
    except PluginError:
        raise
    except AcceleratorError as error:
        return {"ok": False, "name": wish, "reason": str(error)}
    return {"ok": True, "name": precision.name, "reason": precision.reason}


def _candidates(accelerator: Accelerator, operation: str) -> list[dict[str, Any]]:
    """Return every implementation, best first, with the reason why it is used or not."""
    ranked = accelerator.kernels.candidates(operation)
    candidates = []
    for place, (implementation, support) in enumerate(ranked):
        reason = support.reason
        if place > 0 and support.ok:
            reason = f"{ranked[0][0].name} has the higher priority"
            if operation == "attention":
                reason += "; this one is for models that it does not serve"
        candidates.append(
            {
                "name": implementation.name,
                "priority": implementation.priority,
                "ok": support.ok,
                "used": place == 0 and support.ok,
                "reason": reason,
            }
        )
    return candidates


def _print_facts(facts: dict[str, Any], tsv: bool) -> None:
    device, memory, deepspeed = facts["device"], facts["memory"], facts["deepspeed"]
    peaks = ", ".join(f"{peak / 1e12:,.4g} TFLOP/s in {name}" for name, peak in device["peak_flops"].items())
    readings = [f"{name} {value}" for name, value in facts["health"]["readings"].items()]
    health = ", ".join([*readings, *facts["health"]["problems"]])
    rows = [
        ("chosen", facts["reason"]),
        ("provided by", facts["provider"]),
        ("device", f"{device['count']} x {device['model']}, {device['software']}"),
        *([("arithmetic", f"at most {peaks}")] if peaks else []),
        *([("bandwidth", f"at most {device['peak_bandwidth'] / 1e9:,.4g} GB/s")] if device["peak_bandwidth"] else []),
        *([("health", health)] if health else []),
        ("memory", f"{format_bytes(memory['total'])}, of which this process uses {format_bytes(memory['allocated'])}"),
        *([("allocator", facts["allocator"])] if facts["allocator"] else []),
        ("shapes", facts["shapes"]["kind"]),
        ("execution", "lazy" if facts["lazy"] else "eager"),
        ("between processes", facts["dist_backend"]),
        (
            f"DeepSpeed {deepspeed['version']}",
            f"{deepspeed['implementation']}: device {deepspeed['device']}, {deepspeed['communication']} between "
            f"processes, trains in {', '.join(deepspeed['dtypes'])}",
        ),
    ]
    print_table(facts["name"], ("property", "value"), rows, tsv=tsv)
    precisions = [
        (wish, precision["name"] if precision["ok"] else "no", precision["reason"])
        for wish, precision in facts["precisions"].items()
    ]
    print_table("Precisions", ("requested", "used", "reason"), precisions, tsv=tsv)
    operations = [
        (operation, candidate["name"], "yes" if candidate["used"] else "no", candidate["reason"])
        for operation, support in facts["operations"].items()
        for candidate in support["candidates"] or [support | {"name": "", "used": False}]
    ]
    print_table("Operations", ("operation", "implementation", "used", "reason"), operations, tsv=tsv)
