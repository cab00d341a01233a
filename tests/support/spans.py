"""`weight_versions` must say which tokens of an output came from which weights."""

from pathlib import Path
from typing import Any

import numpy as np

from tests.support.forced import output_logits


def assert_spans(results: list[dict[str, Any]]) -> None:
    """Spans cover the output without gap or overlap, in the order of the versions."""
    for result in results:
        spans = result["meta_info"]["weight_versions"]
        edges = [edge for start, end, _ in spans for edge in (start, end)]
        assert edges[0] == 0
        assert edges[-1] == len(result["output_ids"]) == result["meta_info"]["completion_tokens"]
        assert edges[1:-1:2] == edges[2::2]
        assert all(end > start for start, end, _ in spans)
        assert [v for *_, v in spans] == sorted({v for *_, v in spans})


def assert_each_span_is_its_versions(
    prompts: list[list[int]], results: list[dict[str, Any]], versions: list[Path]
) -> None:
    """Every token is the best one after those before it, by the weights that its span names."""
    outputs = [result["output_ids"] for result in results]
    logits = [output_logits(path, prompts, outputs) for path in versions]
    for index, result in enumerate(results):
        for start, end, version in result["meta_info"]["weight_versions"]:
            rows = logits[version % 2][index][start:end]
            chosen = rows[np.arange(end - start), outputs[index][start:end]]
            assert (rows.max(axis=-1) - chosen).max() < 1e-3
