"""The commands `enginepool reference swap`, `kv-cycle` and `hot-update`.

The runs are imported inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from enginepool.cli.arguments import (
    Devices,
    Dtype,
    Model,
    ServerArg,
    TpSize,
    parse_devices,
    parse_server_args,
)
from enginepool.console.complaints import clear_errors
from enginepool.reference.options import RunOptions, WandbOptions, models, read_prompt

app = typer.Typer(
    no_args_is_help=True,
    help="Repeat, with a pool, experiments that another project published for sglang-jax on a "
    "TPU. Each phase is one JSON line. The exit code is 1 if a check fails.",
)


class WeightForm(StrEnum):
    """The form of the weights."""

    CHECKPOINT = "checkpoint"
    FLAX_TREE = "flax-tree"


VerifyParamSharing = Annotated[
    bool,
    typer.Option("--verify-param-sharing", help="Check that engines use the dict's own buffers."),
]


def _read_options(
    model: Model = None,
    weights: Annotated[
        str | None, typer.Option(help="Directory or hub id of the new weights. Default: the model.")
    ] = None,
    devices: Devices = None,
    tp_size: TpSize = 1,
    dtype: Dtype = None,
    prompt: Annotated[
        str | None, typer.Option(help="The prompt. Default: a sum for the toy, else 你是谁.")
    ] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="The prompt, in UTF-8.")] = None,
    max_new_tokens: Annotated[int, typer.Option()] = 64,
    temperature: Annotated[float, typer.Option()] = 0.0,
    max_total_tokens: Annotated[
        int | None, typer.Option(help="KV cache of one engine, in tokens.")
    ] = None,
    server_arg: ServerArg = None,
    wandb: Annotated[
        bool,
        typer.Option("--wandb", help="Also send the phases to Weights & Biases (extra wandb)."),
    ] = False,
    wandb_project: Annotated[str, typer.Option(envvar="WANDB_PROJECT")] = "enginepool-reference",
    wandb_name: Annotated[str | None, typer.Option(envvar="WANDB_NAME")] = None,
) -> RunOptions:
    """The options that all runs take."""
    model_path, weights_path = models(model, weights)
    named = {"dtype": dtype, "max_total_tokens": max_total_tokens}
    return RunOptions(
        model=model_path,
        weights=weights_path,
        devices=parse_devices(devices),
        tp_size=tp_size,
        server_args={
            **parse_server_args(server_arg or []),
            **{name: value for name, value in named.items() if value is not None},
        },
        prompt=read_prompt(prompt, prompt_file, model),
        sampling_params={"temperature": temperature, "max_new_tokens": max_new_tokens},
        wandb=WandbOptions(wandb_project, wandb_name) if wandb else None,
    )


def _command(body: Callable[..., bool]) -> Callable[..., bool]:
    """Make a command of `body(options, …)`, with its own options and those of all runs."""
    _, *own = inspect.signature(body, eval_str=True).parameters.values()
    shared = inspect.signature(_read_options, eval_str=True).parameters.values()

    @functools.wraps(body)
    def command(**given: Any) -> None:
        with clear_errors():
            options = _read_options(
                **{parameter.name: given.pop(parameter.name) for parameter in shared}
            )
            if not body(options, **given):
                raise typer.Exit(1)

    command.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
    app.command()(command)
    return body


@_command
def swap(
    options: RunOptions,
    source: Annotated[
        WeightForm, typer.Option("--from", help="Files, or a trainer's tree in MLLM-JAX's layout.")
    ] = WeightForm.CHECKPOINT,
    keep_param_dict: Annotated[
        bool, typer.Option("--keep-param-dict", help="Keep the dict while engines generate.")
    ] = False,
    verify_param_sharing: VerifyParamSharing = False,
) -> bool:
    """Start engines with dummy weights, give them real weights, generate.

    With a Flax tree, the parameters are on the engines' devices, like a trainer's. The engines use
    the same buffers, so memory must stay at one set.
    """
    from enginepool.reference.swap import run

    return run(
        options,
        from_tree=source is WeightForm.FLAX_TREE,
        keep_param_dict=keep_param_dict,
        verify_param_sharing=verify_param_sharing,
    )


@_command
def kv_cycle(
    options: RunOptions,
    kv_drop_rebuild: Annotated[
        bool, typer.Option(help="Release the KV caches before the second set of parameters comes.")
    ] = True,
    assert_same_output: Annotated[
        bool, typer.Option(help="Whether the run fails if the output differs afterwards.")
    ] = True,
    verify_param_sharing: VerifyParamSharing = False,
) -> bool:
    """Drop the KV caches, hold two sets of parameters, make the caches again, compare outputs."""
    from enginepool.reference.kv_cycle import run

    return run(
        options,
        kv_drop_rebuild=kv_drop_rebuild,
        assert_same_output=assert_same_output,
        verify_param_sharing=verify_param_sharing,
    )


@_command
def hot_update(
    options: RunOptions,
    noise_leaves: Annotated[int, typer.Option(min=1, help="How many leaves are changed.")] = 4,
    noise_seed: Annotated[int, typer.Option()] = 0,
    noise_scale: Annotated[float, typer.Option(help="Standard deviation of the noise.")] = 1e-3,
    reload: Annotated[
        bool, typer.Option(help="Load the weights first. Otherwise dummy weights get the noise.")
    ] = True,
) -> bool:
    """Add noise to the weights of running engines, and see their checksum change."""
    from enginepool.reference.hot_update import Noise, run

    return run(options, Noise(noise_leaves, noise_seed, noise_scale), reload=reload)
