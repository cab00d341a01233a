"""`enginepool plan`: bounds, layouts and verdicts, and every figure from what is printed."""

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig
from typer.testing import CliRunner

from enginepool.cli.main import app
from enginepool.doctor.ahead_of_time.record import Compiled
from enginepool.doctor.plan.bounds import CLEARLY_FASTER
from enginepool.doctor.plan.compiled import by_the_compiler
from enginepool.doctor.plan.plan import make
from enginepool.doctor.plan.report import show
from enginepool.errors import InvalidConfig
from enginepool.sizing.shape import shape_of
from tests.support.published import CONFIGS

ROOT = Path(__file__).parents[2]


def test_memory_follows_from_the_printed_inputs() -> None:
    """Each figure is a formula of other figures in the report, as docs/plan.md has it."""
    plan = make(CONFIGS["4B"], "v4-8", context=4096)
    page, fraction = plan["page_size"], plan["mem_fraction_static"]
    assert plan["weight_bytes"] == 2 * plan["parameters"]
    token = 2 * plan["layers"] * plan["kv_heads"] * plan["head_dim"] * 2
    assert plan["kv_bytes_per_token"] == token
    tokens = (plan["hbm_bytes"] * fraction - plan["weight_bytes"]) / token
    assert plan["kv_tokens"] == math.floor(tokens) // page * page
    assert plan["kv_pages"] * page == plan["kv_tokens"]
    assert plan["kv_bytes"] == (plan["kv_tokens"] + page) * token
    assert plan["requests_at_context"] == plan["kv_pages"] // -(-4096 // page)
    assert plan["running_requests_cap"] == 524288 // -(-4096 // page) // 4
    temporaries = max(plan["prefill_temporary_bytes"], plan["sampler_temporary_bytes"])
    step = plan["logits_bytes"] + plan["tally_bytes"] + temporaries
    assert plan["reserve_bytes"] == plan["program_bytes"] + step
    assert plan["tally_bytes"] == plan["logits_bytes"]
    two = 2 * plan["weight_bytes"] + plan["kv_bytes"] + plan["reserve_bytes"]
    assert plan["second_weight_set_fits"] == (two <= plan["hbm_bytes"]) is True
    assert plan["staging"] == "double"


def test_a_pool_of_small_batches_is_slower_than_tensor_parallelism() -> None:
    """The expected figures are of a roofline by hand. Qwen3-4B on v5e-8 with 64 requests of
    1,024 tokens takes 11.3 ms in 8 engines, and 2.7 ms and 73 all-reduces in one."""
    plan = make(CONFIGS["4B"], "v5e-8", context=1024, batch=64)
    weights, kv = 4_022_468_096 * 2, 8 * 1024 * 147_456
    assert (plan["decode_weight_bytes"], plan["decode_kv_bytes"]) == (weights, kv)
    assert plan["decode_ms_no_faster_than"] == pytest.approx((weights + kv) / 819e9 * 1000)
    least = {row["tp_size"]: row["decode_ms_no_faster_than"] for row in plan["layouts"]}
    assert {tp: round(ms, 1) for tp, ms in least.items()} == {1: 11.3, 2: 6.4, 4: 3.9, 8: 2.7}
    assert [row["all_reduces"] for row in plan["layouts"]] == [0, 73, 73, 73]
    assert plan["recommended"] == {"tp_size": 4, "engines": 2}
    said = "use fewer engines with more chips each; tp_size=4 × 2 engines promises 2.4 times"
    assert said in plan["verdict"]
    assert "all-reduces" in plan["left_out"]


@pytest.mark.parametrize(
    ("model", "host", "batch", "tp_size", "words"),
    [
        ("0.6B", "v6e-8", 2048, 1, "tp_size=1 × 8 engines: no other layout"),
        ("8B", "v5e-8", 8, 8, "does not fit at tp_size=1; take tp_size=8 × 1 engine"),
        ("30B-A3B", "v6e-8", 64, 4, "does not fit at tp_size=1; take tp_size=4 × 2 engines"),
        ("8B", "v6e-8", 8, 8, "a pool of several engines is the wrong choice; tp_size=8 × 1"),
    ],
)
def test_verdicts(model: str, host: str, batch: int, tp_size: int, words: str) -> None:
    plan = make(CONFIGS[model], host, context=1024, batch=batch)
    assert words in plan["verdict"]
    assert plan["recommended"]["tp_size"] == tp_size
    rates = {row["tp_size"]: row["tokens_per_second_compared"] for row in plan["layouts"]}
    assert rates[tp_size] * CLEARLY_FASTER >= max(rates.values()) - 1
    again = make(CONFIGS[model], host, context=1024, batch=batch, tp_size=tp_size)
    assert "no other layout of the host promises clearly more" in again["verdict"]


def test_a_layout_that_is_smaller_than_necessary() -> None:
    plan = make(CONFIGS["0.6B"], "v6e-8", context=1024, batch=2048, tp_size=8)
    assert plan["verdict"].startswith("take tp_size=1 × 8 engines: smaller engines")


def test_a_model_that_fits_nowhere() -> None:
    plan = make(CONFIGS["30B-A3B"], "v5e-1", context=1024)
    assert (plan["fits"], plan["recommended"], plan["decode_ms_no_faster_than"]) == (
        False,
        None,
        None,
    )
    assert plan["verdict"].startswith("it does not fit this host in any layout")
    assert "61.09 GB of weights in 16.91" in plan["advice"][0]["problem"]


def test_experts_are_bounded_by_those_of_one_token() -> None:
    """Any routing reads at least the experts of one token. A uniform routing reads most experts."""
    plan = make(CONFIGS["30B-A3B"], "v6e-8", context=1024, batch=64, tp_size=4)
    layers, hidden, width, vocab = 48, 2048, 768, 151_936
    experts = 3 * 128 * hidden * width * layers * 2 // 4
    rest = plan["weight_bytes"] - experts - vocab * hidden * 2 // 4  # tables are not read whole
    assert plan["decode_weight_bytes"] == rest + experts * 8 // 128
    wanted = 128 * (1 - (1 - 8 / 128) ** plan["running_requests"])
    uniform = rest + experts * wanted / 128 + plan["decode_kv_bytes"]
    assert plan["decode_ms_uniform_routing"] == pytest.approx(uniform / 1640e9 * 1000)
    assert plan["decode_ms_uniform_routing"] > plan["decode_ms_no_faster_than"]


def test_requests_beyond_the_room_wait() -> None:
    plan = make(CONFIGS["4B"], "v5e-8", context=8192, batch=512)
    assert plan["running_requests"] == plan["requests_at_context"] == 5


def test_sliding_layers_read_their_window() -> None:
    """Half of Gemma2's layers read the last 4,096 tokens only."""
    shape = shape_of(AutoConfig.for_model("gemma2"), "bfloat16")  # the 2B model's own dimensions
    assert shape.kv_tokens_read(4096) == 4096
    assert shape.kv_tokens_read(8192) == (4096 + 8192) / 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"host": "v5e-16"}, "topology 'v5e-16'"),
        ({"tp_size": 3}, "tp_size=3: the 8 chips of v5e-8 cannot be divided"),
        ({"batch": 0}, "batch=0: expected a count"),
        ({"server_args": {"page_sise": 16}}, "unknown option page_sise=16; did you mean page_size"),
        ({"context": 64, "server_args": {"context_length": 64}}, "and not both"),
        ({"server_args": {"dp_size": 2}}, "dp_size=2"),
        ({"server_args": {"model_layer_nums": "2"}}, "model_layer_nums='2': expected a count"),
    ],
)
def test_bad_input(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        make(CONFIGS["0.6B"], **({"host": "v5e-8"} | options))


@pytest.mark.parametrize("kind", ["decode", "steady"])
def test_temporaries_of_every_decode_program_count(kind: str) -> None:
    arithmetic: Any = SimpleNamespace(weights=1, kv=1, reserve=1)
    programs = [Compiled(kind, "", temporaries=3), Compiled("prefill", "", temporaries=9)]
    found = by_the_compiler(programs, arithmetic, arithmetic, 1)
    assert found["decode_temporary_bytes"] == 3


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *arguments])


def test_command_as_json() -> None:
    """It takes a pool's options. The user's values replace defaults."""
    options = ("--context", "4096", "--batch", "32", "--dtype", "float32", "--json")
    fraction = ("--server-arg", "mem_fraction_static=0.5", "--server-arg", "page_size=32")
    done = invoke("--model", CONFIGS["0.6B"], "--topology", "v5e-8", *options, *fraction)
    assert done.exit_code == 0, done.output
    plan = json.loads(done.stdout)
    assert plan["weight_bytes"] == 4 * 596_049_920
    assert (plan["page_size"], plan["mem_fraction_static"]) == (32, 0.5)
    assert plan["context"] == 4096
    assert plan["max_running_requests"] == 256
    assert "optimal_seconds" not in done.stdout


def test_command_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    """It prints the inputs, the terms, the verdict and the advice. The exit code is 1 if the
    model does not fit."""
    done = invoke("--model", CONFIGS["8B"], "--topology", "v5e-8", "--context", "4096")
    assert done.exit_code == 1
    for part in ("8,190,735,360 parameters", "does not fit", "4,096 = 524,288 // 32 pages // 4"):
        assert part in done.stdout
    show(make(CONFIGS["4B"], "v4-8", context=4096))
    shown = capsys.readouterr().out
    for part in ("102,144 in 798 pages", "mem_fraction_static=0.7", "never been run", "no faster"):
        assert part in shown
    assert "if prompts are short: page_size=32" in shown
    assert "By the compiler" not in shown


def test_a_mistake_is_one_line() -> None:
    done = invoke("--model", "nowhere.json", "--topology", "v5e-8")
    assert done.exit_code == 2
    assert "nowhere.json: the configuration cannot be read" in done.output


@pytest.mark.slow
def test_docs_table_is_the_commands_own() -> None:
    """The table in docs/plan.md is the output of scripts/plan-table."""
    text = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    table = text.split("<!-- plan -->\n")[1].split("<!-- /plan -->")[0]
    made = subprocess.run(
        [sys.executable, "scripts/plan-table"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert made.returncode == 0, made.stderr
    assert table.strip() == made.stdout.strip()
