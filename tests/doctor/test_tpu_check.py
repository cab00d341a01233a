"""What `make tpu-check` and `plan --compile` refuse, with compiling and without."""

import json
import shlex
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from enginepool import InvalidConfig
from enginepool.doctor.ahead_of_time.record import Record
from enginepool.doctor.ahead_of_time.stand_ins import upstream_without_device
from enginepool.doctor.ahead_of_time.topology import chips_of, libtpu_environment
from enginepool.doctor.plan.plan import make
from enginepool.sizing.chips import TOPOLOGIES
from scripts.tpu_check.__main__ import arguments
from scripts.tpu_check.engine import MODELS, Sizes, model_config, refuse_what_fails
from tests.support.published import CONFIGS
from tests.support.tpu import LIBTPU, check, needs_libtpu, python

ROOT = Path(__file__).parents[2]
V5E = TOPOLOGIES["v5e-8"]


def refused(model: str = "Qwen3-0.6B", **sizes: Any) -> str:
    with pytest.raises(InvalidConfig) as said:
        refuse_what_fails(V5E, model_config(model, None), Sizes(**sizes))
    assert "\n" not in str(said.value)
    return str(said.value)


def test_pages_outside_the_rule_are_refused() -> None:
    """The error has the value, the limit and the remedy."""
    said = refused(page_size=8)
    assert "v5e-8, not compiled: page_size=8: below 16" in said
    assert "leave page_size out (128 on a TPU), or give 16 or more" in said
    both = refused(page_size=1)
    assert "page_size=1: below 16" in both
    assert "runs at most 32 at context_length=4096 and page_size=1" in both


def test_fractions_outside_the_rule_are_refused() -> None:
    """Too large a fraction leaves no room for programs, too small a one none for KV. The error
    names the limits that fit."""
    most = refused(mem_fraction_static=0.99)
    assert "mem_fraction_static=0.99 leaves too little for programs and temporaries" in most
    limit = float(most.partition("at most ")[2].partition(")")[0])
    config = model_config("Qwen3-0.6B", None)
    refuse_what_fails(V5E, config, Sizes(mem_fraction_static=limit))
    refused(mem_fraction_static=limit + 0.01)
    least = refused(mem_fraction_static=0.05)
    assert "0 KV tokens at mem_fraction_static=0.05 (1.19 GB of weights in 16.91)" in least
    low, high = least.partition(": mem_fraction_static=")[2].split(", or")[0].split(" to ")
    assert float(high) == limit
    refuse_what_fails(V5E, config, Sizes(mem_fraction_static=float(low)))
    refused(mem_fraction_static=float(low) - 0.01)


def test_a_model_that_fits_at_no_fraction_is_refused_without_one() -> None:
    said = refused("Qwen3-8B", mem_fraction_static=0.5)
    assert "0 KV tokens at mem_fraction_static=0.5 (16.38 GB of weights in 16.91)" in said
    assert ": a larger tp_size, a smaller context_length, or a chip with more HBM" in said


@pytest.mark.parametrize("page", [16, 32, 128])
@pytest.mark.parametrize("model", MODELS)
def test_what_is_documented_is_not_refused(model: str, page: int) -> None:
    """Each model in the package with two layers and without a fraction, as a pool opens it."""
    for host in TOPOLOGIES.values():
        refuse_what_fails(host, model_config(model, 2), Sizes(page_size=page))


@pytest.mark.slow
def test_the_command_refuses_without_compiling() -> None:
    """With exit code 2 and one line, also without libtpu."""
    code, report, said = check("--page-size", "1")
    assert (code, report) == (2, {})
    (line,) = said.splitlines()
    assert line.startswith("enginepool: v5e-8, not compiled: page_size=1: below 16")


def test_plan_does_not_compile_what_fails() -> None:
    """If the model does not fit, the plan has everything but the compilation."""
    small = {"context": 4096, "server_args": {"page_size": 1}}
    plan = make(CONFIGS["0.6B"], "v5e-8", **small, by_compiler=True)
    assert (plan["fits"], plan["compiled"]) == (False, None)
    assert plan["notes"][-1].startswith("not compiled: page_size=1: below 16")
    assert make(CONFIGS["0.6B"], "v5e-8", **small)["notes"] == []


@pytest.mark.parametrize("topology", ["v4-8", "v5e-8", "v6e-8"])
def test_the_hosted_run_calls_make_with_arguments_that_exist(topology: str) -> None:
    """The workflow runs nothing else. It covers all kinds of models and each host."""
    text = (ROOT / ".github" / "workflows" / "tpu-check.yml").read_text(encoding="utf-8")
    jobs = yaml.safe_load(text)["jobs"]
    assert topology in jobs["programs"]["strategy"]["matrix"]["topology"]
    commands = [
        shlex.split(step["run"].replace("${{ matrix.topology }}", topology))
        for job in jobs.values()
        for step in job["steps"]
        if "run" in step
    ]
    assert {command[0] for command in commands} == {"make"}
    assert commands.pop() == ["make", "test-tpu"]
    models = set()
    for _, target, variable in commands:
        name, _, given = variable.partition("=")
        assert (target, name) == ("tpu-check", "ARGS")
        options = arguments().parse_args(shlex.split(given))
        assert options.topology == [topology]
        assert options.all or not options.layers
        models |= set(options.model or ["Qwen3-4B"])
    families = {model_config(model, None)["model_type"] for model in models}
    assert families == {"llama", "qwen2", "qwen3", "gemma2", "qwen3_moe"}


@pytest.mark.slow
@pytest.mark.skipif(LIBTPU, reason="libtpu is here")
def test_plan_without_libtpu_says_how_to_get_it() -> None:
    """In one line, before anything is built."""
    arguments = ["--model", CONFIGS["0.6B"], "--topology", "v5e-8", "--compile"]
    done = python("-m", "enginepool.cli.main", "plan", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "compiling for v5e-8 needs libtpu, which is not installed" in line
    assert "pip install 'enginepool[tpu]'" in line


@pytest.mark.timeout(900)
@needs_libtpu
def test_plan_by_arithmetic_is_the_compilers_within_5_percent() -> None:
    """The memory of Qwen3-0.6B with all layers on a v5e, with one bucket each. The estimate of
    what programs need is never too low."""
    args = [
        *("max_running_requests=8", "precompile_bs_paddings=[8]", "max_prefill_tokens=256"),
        *("chunked_prefill_size=256", "precompile_token_paddings=[256]"),
    ]
    given = [part for arg in args for part in ("--server-arg", arg)]
    asked = ["--model", CONFIGS["0.6B"], "--topology", "v5e-8", "--context", "1024", *given]
    done = python("-m", "enginepool.cli.main", "plan", *asked, "--compile", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    compiled = plan["compiled"]
    by_arithmetic = compiled["memory_bytes_by_arithmetic"]
    assert compiled["memory_bytes"] == pytest.approx(by_arithmetic, rel=0.05)
    arguments = compiled["argument_bytes_by_arithmetic"]
    assert arguments == plan["weight_bytes"] + plan["kv_bytes"]
    assert compiled["argument_bytes"] == pytest.approx(arguments, rel=0.001)
    assert 0 < compiled["reserve_bytes"] <= compiled["reserve_bytes_by_arithmetic"]
    assert compiled["reserve_bytes"] == plan["reserve_bytes"]
    assert plan["program_count"] == 2
    assert compiled["startup_cpu_seconds"] == 8 * compiled["cpu_seconds_of_an_engine"] > 0
    assert compiled["problems"] == []
    assert plan["fits"]


@pytest.mark.timeout(900)
@needs_libtpu
@pytest.mark.parametrize("model", ["Qwen3-0.6B", "Gemma-2-2B"])
def test_programs_by_arithmetic_are_those_of_an_engine(model: str, tmp_path: Path) -> None:
    """The forward programs of several buckets. Some buckets are asked for and cannot exist."""
    config = model_config(model, 2) | {"vocab_size": 2048}  # quick to compile
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = Sizes(batch=8, prefill=512, context=1024).server_args() | {
        "precompile_bs_paddings": [1, 4, 8, 16],
        "precompile_token_paddings": [4, 64, 128, 256, 1024],
    }
    done = python("-c", _FORWARD_PROGRAMS, json.dumps([config, args]))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    decode = "decode" if config["model_type"] == "gemma2" else "steady"
    assert found == {decode: 3, "prefill": 4}
    plan = make(str(tmp_path), "v5e-8", server_args=args)
    assert plan["program_count"] == sum(found.values())


_FORWARD_PROGRAMS = """
import json
import sys
from collections import Counter
from enginepool.doctor.ahead_of_time.programs import compile_programs
from enginepool.doctor.ahead_of_time.record import FORWARD
from enginepool.sizing.chips import TOPOLOGIES

programs = compile_programs(TOPOLOGIES["v5e-8"], *json.loads(sys.argv[1]), kinds=FORWARD).programs
assert not any(program.problem for program in programs)
print(json.dumps(Counter(program.kind for program in programs)))
"""


@needs_libtpu
@pytest.mark.parametrize("most", [1, 8])
def test_steps_need_only_programs_that_the_warm_up_compiles(most: int) -> None:
    """Requests of every shape run on a chip that is not there, with one and with several decode
    steps a dispatch."""
    code, report, said = check("--kind", "kv_zeros", "--max-decode-steps", str(most))
    assert (code, [program["kind"] for program in report["programs"]]) == (0, ["kv_zeros"]), said
    assert report["steps"] > 50
    assert report["steady_steps"] > 20


@needs_libtpu
@pytest.mark.parametrize("topology", ["v5e-8", "v6e-8"])
def test_programs_with_adapters(topology: str) -> None:
    """They compile, and loading an adapter writes its slot in place. Steps with adapters need no
    program that the warm-up has not compiled."""
    kinds = ("prefill", "steady", "write_adapter")
    asked = [word for kind in kinds for word in ("--kind", kind)]
    code, report, said = check("--lora", "8", "--topology", topology, *asked)
    assert code == 0, said
    found = {program["kind"]: program for program in report["programs"]}
    assert found.keys() == set(kinds)
    write = found["write_adapter"]
    assert 0 < write["donated"] <= write["aliased"]


@pytest.mark.timeout(900)
@needs_libtpu
@pytest.mark.parametrize("kind", ["steady", "prefill"])
def test_steps_without_adapters_read_none(kind: str) -> None:
    """The model has more than a few layers. With few, XLA copies the small leaves into fast
    memory before it is known whether they are needed."""
    code, report, said = check("--lora", "32", "--layers", "28", "--kind", kind)
    assert code == 0, said
    (program,) = report["programs"]
    assert program["adapters"] == 0


@pytest.mark.timeout(900)
@needs_libtpu
def test_sharded_matrices_become_int8_where_they_are() -> None:
    """So no program keeps a matrix in the model's dtype."""
    asked = ["--quantization", "int8.yaml", "--topology", "v6e-8", "--kind", "gather"]
    code, report, said = check(*asked, model="Qwen3-8B")
    assert code == 0, said
    largest = 4096 * 12288  # in int8
    assert max(program["temporaries"] for program in report["programs"]) < largest


@pytest.mark.timeout(900)
@needs_libtpu
def test_experts_in_int8_compile() -> None:
    """Upstream makes the scales of experts before any program runs."""
    asked = ["--quantization", "int8.yaml", "--topology", "v6e-8", "--kind", "steady"]
    code, report, said = check(*asked, model="Qwen3-30B-A3B")
    assert (code, len(report["programs"])) == (0, 1), said


@pytest.mark.timeout(900)
@needs_libtpu
def test_experts_become_int8_one_after_the_other() -> None:
    """So no program has a stack of them in the model's dtype."""
    asked = ["--quantization", "int8.yaml", "--topology", "v4-8", "--kind", "convert"]
    code, report, said = check(*asked, model="Qwen3-30B-A3B")
    assert code == 0, said
    an_expert = 768 * 2048 * 4
    assert max(program["temporaries"] for program in report["programs"]) < 2 * an_expert


@needs_libtpu
def test_several_steps_a_dispatch_compile() -> None:
    """The loop on the device takes over KV cache and state, as a single step does."""
    code, report, said = check("--kind", "steady", "--max-decode-steps", "8")
    assert (code, len(report["programs"])) == (0, 1), said
    for program in report["programs"]:
        assert 0 < program["donated"] <= program["aliased"] < program["arguments"]


@needs_libtpu
def test_a_step_that_needs_another_program_is_a_problem() -> None:
    """Upstream's own warm-up compiles neither the pool's prefill nor steady decode; see
    `engine/warmup.py`."""
    done = python("-c", _UPSTREAMS_WARM_UP)
    assert done.returncode == 0, done.stderr
    late = json.loads(done.stdout)
    assert {kind for kind, _ in late} == {"prefill", "steady", "begin", "tally"}
    assert {problem for _, problem in late} == {
        "a step needs it, and the warm-up has not compiled it"
    }


_UPSTREAMS_WARM_UP = """
import json
from enginepool.doctor.ahead_of_time.programs import compile_programs
from enginepool.engine import warmup
from enginepool.sizing.chips import TOPOLOGIES
from scripts.tpu_check.engine import Sizes, model_config

def upstreams(scheduler, start):
    scheduler.tp_worker.worker.run_precompile()

warmup.warm_up = upstreams
record = compile_programs(
    TOPOLOGIES["v5e-8"],
    model_config("Qwen3-0.6B", 1),
    Sizes(batch=8, prefill=256, context=1024).server_args(),
    kinds=(),
)
print(json.dumps([(program.kind, program.problem) for program in record.programs]))
"""


@needs_libtpu
def test_what_is_broken_is_a_problem() -> None:
    """A prefill that does not take over the KV cache, and a checksum and a comparison that make
    wider copies. Each is the only fault of its engine."""
    done = python("-c", _BROKEN)
    assert done.returncode == 0, done.stderr
    wrong = dict(json.loads(done.stdout))
    assert set(wrong) == {"prefill", "fingerprint", "tied_head"}
    assert "bytes of KV cache are not written in place" in wrong["prefill"]
    for kind in ("fingerprint", "tied_head"):
        assert "bytes of temporaries, 1,048,576 are documented" in wrong[kind]


_BROKEN = """
import json
import jax
import jax.numpy as jnp
from enginepool.doctor.ahead_of_time import stand_ins
from enginepool.doctor.ahead_of_time.programs import compile_programs
from enginepool.sizing.chips import TOPOLOGIES
from enginepool.weights import fingerprint, tied
from scripts.tpu_check.engine import Sizes, model_config
from scripts.tpu_check.weight_programs import weight_programs

def wider(array):
    return jax.lax.optimization_barrier(array.astype(jnp.float32))

jit = stand_ins._jit

def keep(function, **options):
    return jit(function, **{k: v for k, v in options.items() if k != "donate_argnames"})

stand_ins._jit = keep
fingerprint.weighted_sums = jit(lambda arrays: [wider(array).sum() for array in arrays])
tied.equal_on_devices = jit(lambda a, b, _: (wider(a) == wider(b)).all(), static_argnums=2)
record = compile_programs(
    TOPOLOGIES["v5e-8"],
    model_config("Qwen3-0.6B", 1),
    # Two KV caches are to fit.
    Sizes(batch=8, prefill=256, context=1024, mem_fraction_static=0.3).server_args(),
    kinds=("prefill", "fingerprint", "tied_head"),
    further=weight_programs,
)
print(json.dumps([(one.kind, one.problem) for one in record.programs if one.problem]))
"""


@needs_libtpu
@pytest.mark.filterwarnings("ignore:Some donated buffers")
@pytest.mark.parametrize(("page", "fits"), [(1, False), (128, True)])
def test_why_pages_of_one_token_are_refused(page: int, fits: bool) -> None:
    """The page numbers of 64 requests of 4,096 tokens fill a v5e's scalar memory. The attention
    kernel is lowered alone and in small blocks, because upstream's own blocks take minutes with
    such pages."""
    attention = _attention(page, batch=64, context=4096)
    if fits:
        attention.compile()
        return
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"memory space smem.*of 1\.00M smem"):
        attention.compile()


def _attention(page: int, batch: int, context: int) -> Any:
    """Upstream's kernel with the heads of Qwen3-0.6B, lowered for a v5e."""
    with libtpu_environment():
        chips = chips_of(V5E)
        with upstream_without_device(chips, V5E.chip.hbm_bytes, Record(None)):
            from sgl_jax.srt.kernels.ragged_paged_attention import ragged_paged_attention_v3 as rpa

            mesh = Mesh(
                np.array(chips[:1]).reshape(1, 1),
                ("data", "tensor"),
                axis_types=(AxisType.Explicit,) * 2,
            )
            place = NamedSharding(mesh, PartitionSpec())

            def array(shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> Any:
                return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

            def integers(count: int) -> Any:
                return array((count,), jnp.int32)

            pages = context // page
            block = max(page, 64)
            cache = rpa.get_kv_cache_shape(16 * pages, page, 8, 128, jnp.bfloat16)
            with jax.set_mesh(mesh):
                return rpa.ragged_paged_attention.lower(
                    array((batch, 16, 128)),
                    *(array((batch, 8, 128)),) * 2,
                    array(cache),
                    integers(batch),
                    integers(batch * pages),
                    *(integers(batch + 1),) * 2,
                    integers(3),
                    None,
                    d_block_sizes=(1, block, 1, block),
                    p_block_sizes=(8, block, 8, block),
                    m_block_sizes=(8, block, 8, block),
                )
