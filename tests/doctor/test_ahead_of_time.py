"""Programs are compiled for a TPU without one. Tests that need libtpu run with `make test-tpu`."""

import json
import os

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from enginepool import InvalidConfig
from enginepool.doctor.ahead_of_time import stand_ins
from enginepool.doctor.ahead_of_time.programs import compile_programs
from enginepool.doctor.ahead_of_time.reads import read_in_any_case
from enginepool.doctor.ahead_of_time.record import WEIGHTS, Compiled, NotLowered, Record
from enginepool.doctor.ahead_of_time.stand_ins import AbstractArray, upstream_without_device
from enginepool.doctor.ahead_of_time.topology import chips_of, libtpu_environment
from enginepool.sizing.chips import GIB, TOPOLOGIES
from scripts.tpu_check.engine import Sizes, model_config
from scripts.tpu_check.report import overview, table
from tests.support.tpu import LIBTPU, check, needs_libtpu

ONE = jnp.ones((8, 128), jnp.float32)


def compiled(function, **options):
    """A recorded program of an engine whose KV cache is the argument."""
    record = Record(None)
    record.kv_bytes = ONE.nbytes
    record.add("decode", "", jax.jit(function, **options).lower(ONE))
    return record.programs[0]


def test_a_kv_cache_that_is_donated_is_written_in_place():
    """A result in the argument's memory is right."""
    program = compiled(lambda array: array + 1, donate_argnums=0)
    assert program.donated == ONE.nbytes <= program.aliased
    assert program.problem is None


@pytest.mark.filterwarnings("ignore:Some donated buffers")
@pytest.mark.parametrize("options", [{}, {"donate_argnums": 0}], ids=["kept", "of another shape"])
def test_a_kv_cache_that_is_there_twice_is_a_problem(options):
    """Either nobody donated it, or no result can use its memory."""
    program = compiled(lambda array: array.astype(jnp.bfloat16), **options)
    assert program.problem == f"{ONE.nbytes:,} bytes of KV cache are not written in place"


PREFETCHED = """
%taken (given: (bf16[2,4,8], f32[3])) -> f32[3] {
  %given = (bf16[2,4,8]{2,1,0:T(8,128)S(1)}, f32[3]{0}) parameter(0)
  %a.1 = bf16[2,4,8]{2,1,0:T(8,128)S(1)} get-tuple-element(%given), index=0
  ROOT %fusion.1 = f32[3]{0} fusion(%a.1), kind=kLoop, calls=%fused
}

%body (state: (s32[], bf16[2,4,8], bf16[2,8,4])) -> (s32[]) {
  %state = (s32[], bf16[2,4,8]{2,1,0}, bf16[2,8,4]{2,1,0}) parameter(0)
  %a = bf16[2,4,8]{2,1,0:T(8,128)} get-tuple-element(%state), index=1
  %b = bf16[2,8,4]{2,1,0:T(8,128)} get-tuple-element(%state), index=2
  %slice-start = ((bf16[2,4,8]{2,1,0}), bf16[1,4,8]{2,1,0:S(1)}, s32[]) slice-start(%a), slice={}
  %slice-start.1 = ((bf16[2,4,8]{2,1,0}), bf16[1,4,8]{2,1,0:S(1)}, s32[]) slice-start(%a), slice={}
  %fast = bf16[2,4,8]{2,1,0:S(1)} custom-call(%slice-start, %slice-start.1)
  %tuple = (bf16[2,4,8]{2,1,0:S(1)}, bf16[2,8,4]{2,1,0}) tuple(%fast, %b)
  ROOT %conditional = f32[3]{0} conditional(%x, %tuple), branch_computations={%none, %taken}
}

ENTRY %main (a: bf16[2,4,8], b: bf16[2,8,4]) -> f32[3] {
  %a.2 = bf16[2,4,8]{2,1,0} parameter(0)
  %b.2 = bf16[2,8,4]{2,1,0} parameter(1)
  %tuple.2 = (s32[], bf16[2,4,8]{2,1,0}, bf16[2,8,4]{2,1,0}) tuple(%zero, %a.2, %b.2)
  ROOT %while = f32[3]{0} while(%tuple.2), condition=%more, body=%body
}

%more (state: (s32[])) -> pred[] {
  ROOT %yes = pred[] constant(true)
}
"""


def test_reads_outside_branches_count():
    """A copy that begins before the branch counts once. The branch's own reads do not count."""
    a, b = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, 4, 8), (2, 8, 4)))
    assert read_in_any_case(PREFETCHED, [a, b]) == 128
    assert read_in_any_case(PREFETCHED, [b]) == 0


def steady(step, **options):
    """A recorded steady step with a KV cache, a state and a batch of one array each."""
    record = Record(None)
    record.kv_bytes = ONE.nbytes
    record.add("steady", "", jax.jit(step, **options).lower(ONE, ONE, ONE, ONE))
    return record.programs[0]


@pytest.mark.filterwarnings("ignore:Some donated buffers")
def test_a_steady_step_takes_kv_cache_and_state_over():
    """It takes over nothing else: weights and tables are needed for the next step."""

    def step(weights, kv, state, batch):
        return kv + weights, state + batch

    good = steady(step, donate_argnums=(1, 2))
    assert (good.donated, good.aliased, good.problem) == (2 * ONE.nbytes,) * 2 + (None,)
    assert steady(step, donate_argnums=1).problem == (
        f"{ONE.nbytes:,} bytes of KV cache and state are not written in place"
    )
    for kept in (0, 3):
        wrong = steady(step, donate_argnums=(1, 2, kept)).problem
        assert wrong == "it donates a buffer that the next step still needs"


@pytest.mark.parametrize(
    ("kind", "results", "most"),
    [
        *((kind, 10**9, 0) for kind in ("kv_zeros", *WEIGHTS) if kind != "gather"),
        ("top_logprobs", 10**8, 10**9),
        ("gather", 10**8, 10**8 + 10**8 // 16),
        ("cast", 10**8, 10**8 + 10**9 // 16),
        ("convert", 10**8, 10**9 // 16),
    ],
)
def test_more_memory_than_documented_is_a_problem(kind, results, most):
    """The pool's own programs need hardly more memory than they read and write. Two need that
    twice, and those that make int8 need a part more. Upstream's programs have no limit."""
    sizes = {"arguments": 10**9, "largest": 2 * 10**8, "results": results}
    assert Compiled(kind, "", **sizes, temporaries=most + 2**20).problem is None
    wrong = Compiled(kind, "", **sizes, temporaries=most + 2**20 + 1).problem
    assert f"{most + 2**20:,} are documented" in wrong
    assert Compiled("prefill", "", **sizes, temporaries=10**9).problem is None


def test_each_program_is_compiled_once():
    """Two programs of one bucket are both compiled. The same program is compiled once."""
    told = []
    record = Record({"decode"}, told.append)
    for function in (lambda array: array + 1, lambda array: array + 2, lambda array: array + 1):
        record.add("decode", "batch 8", jax.jit(function).lower(ONE))
    record.add("prefill", "", jax.jit(lambda array: array + 3).lower(ONE))
    assert record.programs == told
    assert len(told) == 2


def test_nothing_runs_and_everything_is_put_back():
    """A program that is made among the stand-ins is compiled. Its arrays have no numbers."""
    names = [name for name in vars(jax) if not name.startswith("__")]
    before = {name: getattr(jax, name) for name in names}
    record = Record(None)
    record.listening = True
    ran = []

    def step(array):
        jax.debug.callback(lambda: ran.append(1))
        return array @ array.T

    on_device = SingleDeviceSharding(jax.devices()[0])
    with upstream_without_device(jax.devices()[:1], 2**30, record):
        result = jax.jit(step)(AbstractArray(ONE.shape, ONE.dtype, on_device))
        assert (jax.device_get(result) == 0).all()
        assert jax.default_backend() == "tpu"
        with pytest.raises(NotLowered):
            jax.jit(lambda array: array @ array)(AbstractArray((2, 3), ONE.dtype, on_device))
    assert isinstance(result, jax.Array)
    assert isinstance(result, AbstractArray)
    assert (result.shape, ran) == ((8, 8), [])
    good, bad = record.programs
    assert (good.size, good.problem) == ("8x128", None)
    assert "dot_general" in bad.problem
    assert {name: getattr(jax, name) for name in names} == before


def test_modules_imported_among_stand_ins_stay():
    """A module keeps its functions, so they must run normally afterwards."""
    with upstream_without_device(jax.devices()[:1], 2**30, Record(None)):
        assert not isinstance(jax.jit(table), stand_ins._Program)
        assert isinstance(jax.jit(lambda array: array), stand_ins._Program)


def test_weights_are_one_line_a_kind_in_the_table():
    """Each shape of leaf has a program, and all share a line. A program with a problem gets its
    own line."""
    programs = [
        Compiled("decode", "batch 8", arguments=2 * 10**9, donated=1, aliased=1),
        Compiled("cast", "a 10x10", seconds=1.0, arguments=400),
        Compiled("cast", "b 99x10", seconds=2.0, arguments=4000),
    ]
    programs[0].lowering_seconds = 1.5
    rows = [[cell.strip() for cell in line.split("|")] for line in table(programs).splitlines()]
    seconds = ["1.5", "0.0", "0.0"]
    assert rows[2][1:-1] == ["decode", "batch 8", *seconds, "2.00 GB", "0", "yes", "compiles"]
    assert rows[3][1:7] == ["cast", "2 shapes, to 99x10", "0.0", "3.0", "0.0", "4.00 kB"]
    programs.append(Compiled("cast", "c 1", error="no"))
    assert [row.split("|")[2].strip() for row in table(programs).splitlines()[3:]] == ["c 1"]


def test_several_reports_are_one_line_each():
    """The line has the largest program of each kind, and whether all passed."""
    good = [
        Compiled("prefill", "", cpu_seconds=2.0, temporaries=5),
        Compiled("prefill", "", cpu_seconds=3.0, temporaries=4000, donated=1, aliased=1),
        Compiled("decode", "", cpu_seconds=1.0, donated=2, aliased=2),
    ]
    bad = [Compiled("decode", "", donated=2, aliased=1)]
    about = {"model": "m", "layers": 2, "topology": "v5e-8"}
    dicts = [[program.as_dict() for program in programs] for programs in (good, bad)]
    text = overview([about | {"programs": programs} for programs in dicts])
    rows = [[cell.strip() for cell in line.split("|")][1:-1] for line in text.splitlines()]
    measured = ["3.0", "4.00 kB", "1.0", "0", "-", "-", "-", "-"]
    assert rows[2] == ["m", "2", "v5e-8", "3", *measured, "yes", "compiles"]
    assert rows[3][3:] == ["1", "-", "-", "0.0", "0", *"----", "no", "problems: 1"]


def test_a_model_is_named_or_a_folder(tmp_path):
    """Its layers can be cut. For anything else the error says what can be given."""
    whole = model_config("Qwen3-4B", None)
    assert (whole["num_hidden_layers"], whole["hidden_size"]) == (36, 2560)
    assert model_config("Qwen3-4B", 2) == {**whole, "num_hidden_layers": 2}
    own = {"model_type": "qwen3", "num_hidden_layers": 7, "layer_types": ["full_attention"] * 7}
    (tmp_path / "config.json").write_text(json.dumps(own))
    assert model_config(str(tmp_path), None) == own
    assert len(model_config(str(tmp_path), 3)["layer_types"]) == 3
    with pytest.raises(InvalidConfig, match=r"did you mean Qwen3-4B\?"):
        model_config("Qwen3-4b", 2)


@pytest.mark.skipif(LIBTPU, reason="libtpu is here")
def test_without_libtpu_it_says_how_to_get_it():
    """The environment is left as it was."""
    before = dict(os.environ)
    config = model_config("Qwen3-4B", None)
    with pytest.raises(InvalidConfig, match=r"enginepool\[tpu\]"):
        compile_programs(TOPOLOGIES["v5e-8"], config, Sizes().server_args())
    assert dict(os.environ) == before


@needs_libtpu
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_the_memory_of_a_chip_is_what_the_compiler_says(name):
    """The compiler's error for a program that needs more names it."""
    host = TOPOLOGIES[name]
    hbm_bytes = host.chip.hbm_bytes
    with libtpu_environment():
        place = SingleDeviceSharding(chips_of(host)[0])
        shape = (hbm_bytes // 2**15, 2**15)
        too_large = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place)
        program = jax.jit(lambda array: array + 1).lower(too_large)
        said = rf"[( ]{hbm_bytes / GIB:g}G\b"
        with pytest.raises(Exception, match=said):
            program.compile()


@needs_libtpu
def test_v4_is_refused_without_its_patch():
    """Upstream has no block sizes for v4: not even the first program can be lowered."""
    code, report, _ = check("--topology", "v4-8", "--without", "v4_block_sizes")
    assert code == 1
    assert [program["kind"] for program in report["programs"]] == ["prefill"]
    assert "Unsupported tpu_version=4" in report["programs"][0]["problem"]


@needs_libtpu
def test_v4_compiles_with_its_patch():
    """A steady step takes over its KV cache and state, which are donated."""
    code, report, said = check("--topology", "v4-8", "--kind", "steady")
    (steady,) = report["programs"]
    assert (code, steady["problem"]) == (0, None), said
    assert 0 < steady["donated"] <= steady["aliased"] < steady["arguments"]
    assert steady["arguments"] + steady["temporaries"] < report["hbm_bytes"]


@needs_libtpu
def test_what_upstream_refuses_is_an_error_of_the_caller():
    """The error is one line, with the exit code for input that must be changed."""
    code, _, said = check("--page-size", "96")
    assert code == 2
    assert "divisible by page_size" in said.splitlines()[-1]
