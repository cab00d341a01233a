"""sglang's body of `/generate`, with what a pool adds."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_jax.srt.managers.io_struct import GenerateReqInput


@dataclass
class GenerateBody(GenerateReqInput):
    """Upstream's body, with sglang's `return_sampling_mask`. `lora_path` names an adapter for all
    prompts, or one (null: the base) for each."""

    lora_path: list[str | None] | str | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    return_sampling_mask: bool | None = None
