"""Whether the config.json beside new weights says that they are of the model that is served.

Weights of the same shapes may mean another model: another base of its rotary embedding, another
epsilon, another end token. The engines were built from the first config and keep to it.
"""

from __future__ import annotations

from pathlib import Path

from enginepool.config import PoolConfig
from enginepool.errors import InvalidConfig, InvalidWeights
from enginepool.model_config.reading import load
from enginepool.values import shown

# How a file was written, and what no engine takes from it.
_BESIDE_THE_MODEL = frozenset(
    ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "bos_token_id",
     "pad_token_id")
)  # fmt: skip
_MOST = 5


def check_config(directory: str, config: PoolConfig) -> None:
    """Compare with what the engines were built from; a directory without config.json passes.

    Both are compared as engines read them: in the fields of the installed transformers, under the
    pool's own overrides.

    Raises:
        InvalidWeights: They differ, with the names and both values, or it cannot be read.
    """
    if not Path(directory, "config.json").exists():
        return
    args = config.server_args
    override = args.get("json_model_override_args")
    served = load(config.model, args.get("revision"), args.get("download_dir"), override).to_dict()
    try:
        given = load(directory, override_args=override).to_dict()
    except InvalidConfig as error:
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
