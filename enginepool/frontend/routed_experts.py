"""The experts of a request's tokens, as results and replies have them."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np

from enginepool.dispatch.request import Request
from enginepool.dispatch.routed_experts import RoutedTokens, Routing

EXPERTS = "routed_experts"


def experts_text(request: Request) -> str:
    """sglang's form: base64 of int32. Empty if nothing was computed."""
    rows = _rows(request)
    return "" if rows is None else base64.b64encode(rows.tobytes()).decode()


def experts_file(request: Request, start: int = 0) -> str | None:
    """vLLM's form: base64 of a `.npy` file. None if nothing was computed.

    Args:
        start: The first position. A position after the prompt counts as the prompt's end.
    """
    if (rows := _rows(request)) is None:
        return None
    file = io.BytesIO()
    np.save(file, rows[min(start, len(request.input_ids)) :])
    return base64.b64encode(file.getvalue()).decode()


def read_experts(text: Any, routing: Routing, positions: int) -> RoutedTokens:
    """The inverse of `experts_text`.

    Raises:
        ValueError, TypeError: The text does not have this many positions.
    """
    flat = np.frombuffer(base64.b64decode(text, validate=True), np.int32)
    return RoutedTokens.of_whole(
        routing, flat.reshape(positions, len(routing.layers), routing.top_k)
    )


def _rows(request: Request) -> np.ndarray | None:
    if request.experts is None:
        return None
    return request.experts.whole(len(request.input_ids) + len(request.output_ids) - 1)
