"""The options of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enginepool import toy
from enginepool.errors import InvalidConfig, InvalidRequest

_TOY_PROMPT = "12+7="
# The values of the original scripts.
_PROMPT = "你是谁"
_SERVER_ARGS = {
    "mem_fraction_static": 0.8,
    "max_prefill_tokens": 1024,
    "max_running_requests": 16,
    "max_total_tokens": 4096,
}


@dataclass(frozen=True)
class WandbOptions:
    """The project and name of a run at Weights & Biases. The default name is the command's, with
    the time."""

    project: str
    name: str | None


@dataclass(frozen=True)
class RunOptions:
    """The options of all runs.

    Attributes:
        model: Directory or hub id, whose configuration the dummy engines have.
        weights: Directory or hub id of the weights that come in.
        server_args: Upstream's `ServerArgs`, by name.
        wandb: None for no W&B.
    """

    model: str
    weights: str
    devices: int | list[int] | None
    tp_size: int
    server_args: Mapping[str, Any]
    prompt: str
    sampling_params: Mapping[str, Any]
    wandb: WandbOptions | None

    def for_platform(self, platform: str) -> dict[str, Any]:
        """Upstream's arguments: those of the original scripts, but on CPU the pool's own smaller
        values."""
        if "load_format" in self.server_args:
            raise InvalidConfig("--server-arg load_format: these runs start with dummy weights")
        chosen = {} if platform == "cpu" else _SERVER_ARGS
        return {**chosen, **self.server_args, "load_format": "dummy"}


def models(model: str | None, weights: str | None) -> tuple[str, str]:
    """The model and the weights. The default model is the toy. The default weights are the model's
    own."""
    model = model or str(toy.checkpoint())
    return model, weights or model


def read_prompt(prompt: str | None, file: Path | None, model: str | None) -> str:
    """The prompt as it was given, or one that suits the model."""
    if prompt is not None and file is not None:
        raise InvalidRequest("give the prompt with --prompt or with --prompt-file, and not both")
    if file is None:
        return prompt if prompt is not None else (_PROMPT if model else _TOY_PROMPT)
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"--prompt-file {file}: {error}") from None
