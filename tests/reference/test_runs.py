"""The reference's runs: their phases, what must hold between phases, and what happens if it does
not.

Each run is a process of its own, so that bytes can be compared exactly.
"""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from enginepool import toy
from enginepool.cli.main import app
from tests.support.pools import SMALL
from tests.support.reference import make_random_model
from tests.support.xla import virtual_devices

SMALL_ARGS = [part for item in SMALL.items() for part in ("--server-arg", "{}={}".format(*item))]
SUBTRACT = str(toy.checkpoint("subtract"))
PROMPT = "12+7="
# What the toy answers with these weights. To its own answer it answers nothing.
SUM, DIFFERENCE, SILENCE = "19", "5", "12+7=19"
LEAVES = 35

KV_PHASES = [
    "flush_cache_before_kv_drop",
    "kv_cache_dropped",
    "sglang_param_dict2_ready",
    "after_drop_mllm_params_cpu",
    "kv_cache_rebuilt",
    "generate_result_after_kv_rebuild",
    "after_drop_param_dict2",
]
FROM_TREE = [
    "jax_ready",
    "engine_ready_dummy",
    "mllm_params_cpu_ready",
    "sglang_param_dict_ready",
    "weights_swapped_from_mllm",
    "param_sharing_check",
]

# An engine that copies instead of sharing, and a pool that keeps memory that it should free.
FAULTS = """
from enginepool import EnginePool
from enginepool.cli import main, reference
options = reference.RunOptions
def endless(sampling_params, **given):
    # Hot as it is, the first token may be the end; then there is no text, another fault.
    return options(sampling_params=sampling_params | {"ignore_eos": True}, **given)
reference.RunOptions = endless
update = EnginePool.update_weights
EnginePool.update_weights = lambda pool, source: update(pool, source, copy=True)
EnginePool.release_memory_occupation = lambda pool: 0
main.main()
"""


class Ended(NamedTuple):
    """A finished run.

    Attributes:
        phases: What it printed, by phase.
        other: Lines that are not JSON.
    """

    code: int
    phases: dict[str, dict[str, Any]]
    other: list[str]
    stderr: str

    def in_use(self, phase: str) -> int:
        return self.phases[phase]["memory"]["jax_device_memory_summary"]["bytes_in_use_sum"]


def start(
    *arguments: str, program: tuple[str, ...] = ("-m", "enginepool.cli"), **env: str
) -> Ended:
    done = subprocess.run(
        [sys.executable, *program, "reference", *arguments, *SMALL_ARGS],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "XLA_FLAGS": virtual_devices(2), **env},
    )
    lines = done.stdout.splitlines()
    records = [json.loads(line) for line in lines if line.startswith("{")]
    phases = {record["phase"]: record for record in records}
    assert len(phases) == len(records), "a phase came twice"
    other = [line for line in lines if not line.startswith("{")]
    return Ended(done.returncode, phases, other, done.stderr)


@pytest.fixture(scope="module")
def wandb_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("wandb")


@pytest.fixture(scope="module")
def ended(wandb_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ended]:
    """A finished run by its name. It runs once, when it is first asked for."""
    wandb = {"WANDB_MODE": "offline", "WANDB_DIR": str(wandb_dir)}
    offline = ("--wandb", "--wandb-project", "tests")

    def does_not_fit() -> Ended:
        model = make_random_model(tmp_path_factory.mktemp("other-shapes"), "qwen3", num_layers=1)
        return start("swap", "--devices", "1", "--weights", str(model))

    runs: dict[str, Callable[[], Ended]] = {
        "kv-cycle": lambda: start(
            "kv-cycle", "--devices", "2", "--verify-param-sharing", *offline, **wandb
        ),
        "swap": lambda: start("swap", "--devices", "1", "--weights", SUBTRACT),
        "flax-tree": lambda: start(
            *("swap", "--devices", "2", "--weights", SUBTRACT, "--from", "flax-tree"),
            *("--keep-param-dict", "--verify-param-sharing"),
        ),
        # No project can have this name, so W&B refuses the run.
        "hot-update": lambda: start(
            *("hot-update", "--devices", "1", "--wandb", "--wandb-project", "a/b"), **wandb
        ),
        "does not fit": does_not_fit,
        "faults": lambda: start(
            *("kv-cycle", "--devices", "1", "--verify-param-sharing"),
            *("--temperature", "5", "--max-new-tokens", "16"),
            program=("-c", FAULTS),
        ),
        "no change": lambda: start(
            *("hot-update", "--devices", "1", "--noise-scale", "0"),
            *("--noise-leaves", "1", "--prompt", SILENCE),
        ),
    }
    return cache(lambda name: runs[name]())


def passed(run: Ended, phases: list[str]) -> None:
    """The run printed these phases, and every memory object is complete."""
    assert run.code == 0, run.stderr
    assert list(run.phases) == phases
    elapsed = [record["elapsed_s"] for record in run.phases.values()]
    assert elapsed == sorted(elapsed)
    for record in run.phases.values():
        memory = record["memory"]
        assert set(memory) == {
            "process_rss_bytes",
            "jax_device_memory_stats",
            "jax_device_memory_summary",
        }
        each = [stats["bytes_in_use"] for stats in memory["jax_device_memory_stats"]]
        assert memory["jax_device_memory_summary"] == {
            "bytes_in_use_sum": sum(each),
            "bytes_in_use_min": min(each),
            "bytes_in_use_max": max(each),
        }
        assert memory["process_rss_bytes"] > 0


def hashed(text: str) -> str:
    return sha256(text.encode()).hexdigest()


@pytest.mark.slow
def test_swap(ended: Callable[[str], Ended]) -> None:
    """Dummy engines of a model that adds subtract after the update, with as many leaves and
    bytes as before."""
    run = ended("swap")
    phases = ["jax_ready", "engine_ready_dummy", "weights_swapped", "generate_result"]
    passed(run, phases)
    ready, swapped, result = (run.phases[name] for name in phases[1:])
    assert (ready["load_format"], ready["tp_size"], ready["dp_size"]) == ("dummy", 1, 1)
    assert ready["model_id"] == str(toy.checkpoint("add"))
    assert ready["num_model_state_leaves"] == swapped["num_model_state_leaves"] == LEAVES
    assert swapped["snapshot_dir"] == SUBTRACT
    assert run.in_use("weights_swapped") == run.in_use("engine_ready_dummy") > 0
    assert (result["prompt"], result["text"], result["raw"]["text"]) == (PROMPT, *[DIFFERENCE] * 2)
    assert result["sampling_params"] == {"temperature": 0, "max_new_tokens": 64}
    assert (result["prompt_sha256"], result["text_sha256"]) == (hashed(PROMPT), hashed(DIFFERENCE))


@pytest.mark.slow
def test_swap_from_flax_tree(ended: Callable[[str], Ended]) -> None:
    """Engines use the buffers of a parameter dict on their devices. Each device has one set in
    memory while the dict lives and when it is gone."""
    run = ended("flax-tree")
    generation = ["before_generate_param_dict_kept", "generate_result", "after_drop_param_dict"]
    passed(run, FROM_TREE + generation)
    assert run.phases["engine_ready_dummy"]["num_model_state_leaves"] == 2 * LEAVES
    assert run.phases["sglang_param_dict_ready"]["num_params"] == LEAVES
    check = run.phases["param_sharing_check"]
    assert len(check["results"]) == 5
    for entry in check["results"].values():
        assert entry == {"found_in_param_dict": True, "same_object": True}
    assert check["num_same_object"] == check["num_params"] == LEAVES
    for engine in run.phases["weights_swapped_from_mllm"]["engines"]:
        assert (engine["shared"], engine["copied"]) == (LEAVES, 0)

    ready = run.in_use("engine_ready_dummy")
    one_set = run.in_use("sglang_param_dict_ready") - ready
    weights = (toy.checkpoint("subtract") / "model.safetensors").stat().st_size
    assert 2 * 2 * 0.95 * weights < one_set < 2 * 2 * weights  # float32, two devices
    assert run.in_use("weights_swapped_from_mllm") == ready
    assert run.in_use("before_generate_param_dict_kept") == ready
    assert run.in_use("after_drop_param_dict") == run.in_use("generate_result") < ready + one_set
    result = run.phases["generate_result"]
    assert [engine["text_sha256"] for engine in result["engines"]] == [hashed(DIFFERENCE)] * 2


@pytest.mark.slow
def test_kv_cycle(ended: Callable[[str], Ended]) -> None:
    """Dropping the KV caches frees exactly their bytes, a second set of parameters fits
    meanwhile, and afterwards the output is the same, without a compilation."""
    run = ended("kv-cycle")
    passed(run, ["wandb_init", *FROM_TREE, "after_cleanup", "generate_result", *KV_PHASES])
    drop = run.phases["kv_cache_dropped"]["drop_info"]
    rebuild = run.phases["kv_cache_rebuilt"]["rebuild_info"]
    assert drop["kv_pool_type"] == "MHATokenToKVPool"
    assert (drop["layer_num"], drop["dtype"], drop["deleted_buffers"]) == (3, "float32", 6)
    assert drop["fused_bytes_total"] == 2 * 3 * drop["fused_bytes_per_layer"] > 0
    assert (drop["missing_delete_method"], drop["clear_jax_caches"]) == (0, False)
    assert rebuild.items() < drop.items()

    used = [run.in_use(phase) for phase in KV_PHASES]
    flushed, dropped, two_sets, _, rebuilt, again, after = used
    one_set = run.in_use("sglang_param_dict_ready") - run.in_use("engine_ready_dummy")
    assert flushed - dropped == rebuilt - two_sets == drop["fused_bytes_total"]
    assert two_sets - dropped == again - after == one_set
    assert after == flushed

    result = run.phases["generate_result_after_kv_rebuild"]
    assert (result["text"], result["same_output"], result["compiled"]) == (SUM, 1, 0)
    assert result["text_sha256_before"] == result["text_sha256"] == hashed(SUM)
    assert run.other == [
        f"[determinism] same_output=1 output1_sha256={hashed(SUM)} output2_sha256={hashed(SUM)}"
    ]


@pytest.mark.slow
def test_hot_update(ended: Callable[[str], Ended]) -> None:
    """Noise changes the checksum of every engine. W&B refuses the run, which is reported as in
    the reference, and the run goes on."""
    run = ended("hot-update")
    phases = ["jax_ready", "engine_ready_dummy", "reload", "checksum_before", "perturb"]
    passed(run, ["wandb_init_error", *phases, "generate_text"])
    assert "a/b" in run.phases["wandb_init_error"]["error"]
    assert "WANDB_MODE=offline" in run.phases["wandb_init_error"]["hint"]
    assert "the run goes on without it" in run.stderr

    reload, before, perturb = (run.phases[name] for name in phases[2:])
    assert reload["reload"]["resolved_path"] == str(toy.checkpoint("add"))
    assert reload["reload"]["leaf_count"] == LEAVES
    assert perturb["perturb"] == {"num_leaves": 4, "noise_seed": 0, "noise_scale": 1e-3}
    assert perturb["checksum_delta"] == perturb["checksum_after"] - before["checksum_before"] != 0
    assert perturb["fingerprint"] != before["fingerprint"]
    assert run.phases["generate_text"]["generate_text"] == SUM


@pytest.mark.slow
def test_weights_that_do_not_fit(ended: Callable[[str], Ended]) -> None:
    """A phase has the error and the remedy, then the run ends."""
    run = ended("does not fit")
    assert run.code == 1
    assert list(run.phases)[-1] == "weights_swap_error"
    error = run.phases["weights_swap_error"]
    assert "model.layers.1" in error["error"]
    assert "--model" in error["hint"]
    assert run.stderr.startswith("enginepool: ")


@pytest.mark.slow
def test_failed_checks(ended: Callable[[str], Ended]) -> None:
    """Copied weights, kept KV caches and a changed output are each named on standard error. The
    run goes on to its end and fails."""
    run = ended("faults")
    assert run.code == 1
    assert list(run.phases)[-1] == KV_PHASES[-1]
    assert run.phases["generate_result_after_kv_rebuild"]["same_output"] == 0
    failed = [line.removeprefix("enginepool: check failed: ") for line in run.stderr.splitlines()]
    assert [line.partition(":")[0] for line in failed] == [
        "weights_swapped_from_mllm",
        "param_sharing_check",
        "kv_cache_dropped",
        "kv_cache_rebuilt",
        "generate_result_after_kv_rebuild",
    ]
    assert f"{LEAVES} of {LEAVES} leaves" in failed[1]


@pytest.mark.slow
def test_noise_that_changes_nothing_is_a_failed_check(ended: Callable[[str], Ended]) -> None:
    run = ended("no change")
    assert run.code == 1
    assert run.phases["perturb"]["checksum_delta"] == 0
    assert "perturb: checksum_delta is 0" in run.stderr
    assert "generate_text: the text of engines [0] is empty" in run.stderr


@pytest.mark.slow
def test_wandb_file(ended: Callable[[str], Ended], wandb_dir: Path) -> None:
    """Offline, the run's file has one step per phase with the reference's keys, and the texts."""
    run = ended("kv-cycle")
    name = f"run-{run.phases['wandb_init']['id']}.wandb"
    (file,) = wandb_dir.glob(f"wandb/offline-run-*/{name}")
    steps: dict[int, dict[str, Any]] = {}
    for record in wandb_records(file):
        items = {"/".join(i.nested_key) or i.key: i.value_json for i in record.history.item}
        if items:
            steps.setdefault(record.history.step.num, {}).update(
                {key: json.loads(value) for key, value in items.items()}
            )
    by_phase = {step["phase/name"]: step for step in steps.values()}
    assert list(by_phase) == list(run.phases)
    for index, (phase, step) in enumerate(by_phase.items()):
        memory = run.phases[phase]["memory"]
        assert step["phase/idx"] == index
        assert step["mem/process/rss_bytes"] == memory["process_rss_bytes"]
        assert step["mem/jax/bytes_in_use_sum"] == run.in_use(phase)
        assert step["mem/jax/device1/bytes_in_use"] > 0 or phase in ("wandb_init", "jax_ready")
    drop = run.phases["kv_cache_dropped"]["drop_info"]
    for name in ("fused_bytes_total", "fused_bytes_per_layer", "deleted_buffers"):
        assert by_phase["kv_cache_dropped"][f"kv/{name}"] == drop[name]
    assert by_phase["generate_result_after_kv_rebuild"]["determinism/same_output"] == 1
    table = file.parent / "files" / by_phase["after_drop_param_dict2"]["sample_texts/path"]
    assert json.loads(table.read_text())["data"] == [
        [kind, hashed(text), len(text), text]
        for kind, text in (("prompt", PROMPT), ("output_1", SUM), ("output_2", SUM))
    ]


def wandb_records(file: Path) -> Iterator[Any]:
    """The messages of a run's file: LevelDB's log format, after a header of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, message = file.read_bytes(), 7, b""
    while at < len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            yield Record.FromString(message)
            message = b""


def test_wandb_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the extra, before anything starts."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    result = CliRunner().invoke(app, ["reference", "swap", "--wandb"])
    assert result.exit_code == 2
    assert [json.loads(line)["phase"] for line in result.stdout.splitlines()] == [
        "wandb_init_error"
    ]
    assert "pip install 'enginepool[wandb]'" in result.stderr


@pytest.mark.slow
def test_folder_of_wandb_runs_is_not_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """wandb keeps its runs in ./wandb, which Python would import as a package without code."""
    (tmp_path / "wandb").mkdir()
    for name in [name for name in sys.modules if name.partition(".")[0] == "wandb"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    result = CliRunner().invoke(app, ["reference", "swap", "--wandb"])
    assert result.exit_code == 2
    assert "pip install 'enginepool[wandb]'" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["swap", "--keep-param-dict"], "need --from flax-tree"),
        (["swap", "--from", "memory"], "'memory' is not one of 'checkpoint', 'flax-tree'"),
        (["swap", "--server-arg", "load_format=auto"], "these runs start with dummy weights"),
        (["kv-cycle", "--prompt", "a", "--prompt-file", "b"], "--prompt-file, and not both"),
        (["kv-cycle", "--prompt-file", "no-such-file"], "No such file"),
        (["hot-update", "--devices", "all"], "expected a count such as 4"),
    ],
)
def test_bad_input(arguments: list[str], message: str) -> None:
    """Nothing starts."""
    result = CliRunner().invoke(app, ["reference", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", "").split())


def test_wandb_is_imported_on_demand() -> None:
    program = (
        "import sys, enginepool.cli.main, enginepool.reference.kv_cycle"
        ", enginepool.reference.hot_update; print(sorted({'wandb', 'flax'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
