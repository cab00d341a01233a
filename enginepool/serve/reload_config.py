"""Whether the config.json beside new weights says that they are of the model that is served.

Weights of the same shapes may mean another model: another base of its rotary embedding, another
epsilon, another end token. The engines were built from the first config and keep to it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from enginepool.errors import InvalidWeights
from enginepool.values import shown

# How a file was written, and what no engine takes from it.
_BESIDE_THE_MODEL = frozenset(
    ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "bos_token_id",
     "pad_token_id")
)  # fmt: skip
_MOST = 5


def check_config(directory: str, server_args: Any) -> None:
    """Compare with what the engines were built from; a directory without config.json passes.

    Raises:
        InvalidWeights: They differ, with the names and both values, or it cannot be read.
    """
    from sgl_jax.srt.hf_transformers_utils import get_config

    if not Path(directory, "config.json").exists():
        return
    trust = server_args.trust_remote_code
    served = get_config(server_args.model_path, trust, server_args.revision).to_dict()
    try:
        given = get_config(directory, trust).to_dict()
    except Exception as error:  # transformers raises as it comes
        raise InvalidWeights(f"{directory}/config.json cannot be read: {error}") from error
    names = sorted((served.keys() | given.keys()) - _BESIDE_THE_MODEL)
    wrong = [
        f"{name}={shown(given.get(name))} (served: {shown(served.get(name))})"
        for name in names
        if given.get(name) != served.get(name)
    ]
    if wrong:
        more = f" and {len(wrong) - _MOST} more" if len(wrong) > _MOST else ""
        raise InvalidWeights(
            f"{directory}/config.json does not fit the model that is served: "
            f"{'; '.join(wrong[:_MOST])}{more}; start a server for that model"
        )
