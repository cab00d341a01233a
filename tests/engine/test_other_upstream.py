"""If parts of upstream have moved, an error names them. Every module that reaches into upstream
says why."""

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

import enginepool
from enginepool import EnginePool, EnginePoolError, EngineStartFailed, toy
from enginepool.engine.kv_cache import KVCache
from enginepool.engine.top_logprobs import TopLogprobs
from enginepool.weights.leaves import EngineLeaves
from patches._lookup import module
from tests.support.faults import scheduler_of
from tests.support.pools import SMALL

PACKAGE = Path(enginepool.__file__).parent
HEADINGS = ("\nWhat breaks: ", "\nWhy: ", "\nRemove when: ")

# A defect that can be repaired for everybody becomes a patch, not one more of these.
REACHES = {
    "engine/adapter_admission.py",
    "engine/adapter_slots.py",
    "engine/build.py",
    "engine/common_programs.py",
    "engine/config_reads.py",
    "engine/device_wait.py",
    "engine/executable_cache.py",
    "engine/exported_forward.py",
    "engine/grammar.py",
    "engine/kv_cache.py",
    "engine/rotary_check.py",
    "engine/routed_experts.py",
    "engine/sampling_mask.py",
    "engine/scheduler.py",
    "engine/prefill_program.py",
    "engine/prefix_cache.py",
    "engine/steady/admission.py",
    "engine/steady/block_table.py",
    "engine/steady/decode.py",
    "engine/steady/decode_step.py",
    "engine/steady/extend.py",
    "engine/steady/forward.py",
    "engine/steady/input_batch.py",
    "engine/steady/penalties.py",
    "engine/steady/prefill.py",
    "engine/steady/prefill_step.py",
    "engine/steady/program.py",
    "engine/steady/sample.py",
    "engine/steady/upstream_batch.py",
    "engine/teardown.py",
    "engine/top_logprobs.py",
    "engine/upstream_prefill.py",
    "engine/warmup.py",
    "lora/layers.py",
    "process/quick_exit.py",
    "serve/answer_form.py",
    "serve/chat_stream.py",
    "serve/openai_serving.py",
    "serve/stream_parsers.py",
    "weights/leaves.py",
    "weights/loader.py",
    "weights/mapping.py",
    "weights/quantized.py",
    "weights/reading.py",
}


def docstrings(path: Path) -> list[str]:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    return [doc for node in nodes if isinstance(node, kinds) and (doc := ast.get_docstring(node))]


def test_each_module_says_why_it_reaches_into_upstream() -> None:
    """The reasons are at the top of the file, with a patch's headings. These are all such files."""
    said = set()
    for path in PACKAGE.rglob("*.py"):
        for doc in docstrings(path):
            if "What breaks: " in doc:
                places = [doc.index(heading) for heading in HEADINGS]
                assert places == sorted(places), path
        if (top := docstrings(path)) and "Reaches into " in top[0]:
            said.add(str(path.relative_to(PACKAGE)))
            assert HEADINGS[0] in top[0], path
    assert said == REACHES


def test_no_other_module_imports_from_jax_src() -> None:
    """`jax._src` is imported only inside functions, where it is used. (What compiles without a
    device runs by hand, with the JAX that the constraints name.)"""
    places = {"engine/executable_cache.py", "doctor/ahead_of_time/stand_ins.py"}
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        modules = [
            (node, node.module if isinstance(node, ast.ImportFrom) else node.names[0].name)
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        found = [node for node, module in modules if (module or "").startswith("jax._src")]
        assert not found or str(path.relative_to(PACKAGE)) in places, path
        assert not set(found) & set(tree.body), path


def runner(**changes: Any) -> Any:
    """An object like upstream's model runner, as far as our code reaches into it."""
    pools = SimpleNamespace(_pools={"one": SimpleNamespace(buffers=[jnp.zeros(2)])})
    parts = {"memory_pools": pools, "token_to_kv_pool": None, "mesh": None}
    return SimpleNamespace(**(parts | changes))


def test_kv_cache() -> None:
    KVCache(runner())
    with pytest.raises(EnginePoolError, match="SimpleNamespace has no _pools"):
        KVCache(runner(memory_pools=SimpleNamespace()))
    with pytest.raises(EnginePoolError, match="found no buffers"):
        KVCache(runner(memory_pools=SimpleNamespace(_pools={})))


def test_leaves() -> None:
    with pytest.raises(EnginePoolError, match="has no model"):
        EngineLeaves(runner())


def test_top_logprobs() -> None:
    with pytest.raises(EnginePoolError, match=r"takes \(logits\), expected \(logits, token_ids\)"):
        TopLogprobs(runner(compute_logprobs=lambda logits: logits))


def test_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what still works."""
    monkeypatch.delattr(module("sgl_jax.srt.utils.weight_utils").WeightLoader, "_get_param")
    from enginepool.weights.mapping import HuggingFaceMapping  # it imports upstream

    with pytest.raises(EnginePoolError, match=r"has no _get_param; .* takes an nnx.State"):
        HuggingFaceMapping(None, None, {})


@pytest.mark.parametrize(
    ("place", "options", "message"),
    [
        ("managers.scheduler.Scheduler.get_new_batch_prefill", {}, "has no get_new_batch_prefill"),
        (
            "managers.schedule_batch.ModelWorkerSamplingInfo.update_grammar_vocab_mask",
            {},
            "has no update_grammar_vocab_mask",
        ),
        (
            "model_executor.compilation_manager.CompilationManager._make_dummy_batch",
            {"warmup": "sequential"},
            'has no _make_dummy_batch; open the pool with warmup="none"',
        ),
    ],
)
def test_opening(
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    options: dict[str, Any],
    message: str,
) -> None:
    """An engine does not start, and the error names what it misses."""
    where, name, method = place.rsplit(".", 2)
    monkeypatch.delattr(getattr(module(f"sgl_jax.srt.{where}"), name), method)
    options = SMALL | {"warmup": "none"} | options
    with pytest.raises(EngineStartFailed, match=message) as caught:
        EnginePool(str(toy.checkpoint()), devices=1, **options).open()
    assert isinstance(caught.value.__cause__, EnginePoolError)


def test_a_loader_with_other_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine does not start without the checks that its loader makes."""
    loader = module("sgl_jax.srt.model_loader.loader").JAXModelLoader
    initialize = loader._initialize_model
    monkeypatch.setattr(loader, "_initialize_model", lambda self, config: initialize(self, config))
    with pytest.raises(EngineStartFailed, match=r"takes \(config\), expected \(model_config\)"):
        EnginePool(str(toy.checkpoint()), devices=1, warmup="none", **SMALL).open()


def test_weights_that_a_backend_prepares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then upstream's own programs run, because ours would compute with other weights."""
    from enginepool.engine.steady.program import supported
    from enginepool.engine.upstream_prefill import UpstreamPrefill

    options = SMALL | {"warmup": "none"}
    with EnginePool(str(toy.checkpoint()), devices=1, **options) as pool:
        scheduler = scheduler_of(pool, 0)
        worker = scheduler.tp_worker.worker
        able, runs = supported(scheduler), worker.model_runner.jitted_run_model
        backend: Any = type(worker.model_runner.attn_backend)
        monkeypatch.setattr(backend, "prepare_model_state", lambda *_: None, raising=False)
        assert not supported(scheduler)
        assert UpstreamPrefill(worker).refusal
        assert worker.model_runner.jitted_run_model is runs
        monkeypatch.undo()
        assert supported(scheduler) is able
