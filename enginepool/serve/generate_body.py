"""sglang's body of `/generate`, with what a pool adds."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_jax.srt.managers.io_struct import GenerateReqInput


@dataclass
class GenerateBody(GenerateReqInput):
    """Upstream's, with sglang's `return_sampling_mask`."""

    return_sampling_mask: bool | None = None
