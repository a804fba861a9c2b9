"""``hs-capture serve``: SGLang with the capture classes, by the documented plain command."""

import os
import sys
from typing import Annotated

import typer

from sglang_hs_capture.cli import options
from sglang_hs_capture.driver.check import check_output, find_model, make_output
from sglang_hs_capture.driver.device import Device, use_cpu
from sglang_hs_capture.driver.launch import plan_server


@options.with_options(capture=options.CaptureOptions)
def serve(
    ctx: typer.Context,
    *,
    model: options.ModelOption,
    output: options.OutputOption,
    capture: options.CaptureOptions,
    device: options.DeviceOption = Device.AUTO,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command and do nothing else.")] = False,
) -> None:
    """Serve a model with SGLang and capture the requests whose id has the prefix.

    Prints the plain command that it runs, ready to be copied. Everything after -- goes to SGLang.
    """
    cpu = use_cpu(device)
    plan = plan_server(model, capture.config(output, cpu=cpu), ctx.obj or [], cpu=cpu)
    config = find_model(model)
    typer.echo(plan.shell_line())
    if dry_run:
        return
    directory = output.expanduser().resolve()
    make_output(directory)
    check_output(directory, config, plan.capture)
    sys.stdout.flush()
    os.execvpe(plan.command[0], list(plan.command), {**os.environ, **plan.environment})
