"""Drive upstream's real Scheduler in this process, one request list at a time."""

import contextlib
import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np

VOCAB = 64
HIDDEN = HEAD_DIM = 128


def write_checkpoint(folder: Path, seed: int = 0) -> Path:
    """Write a one-layer Qwen3 checkpoint of random weights with a word-level tokenizer."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="t1", unk_token="t0"
    ).save_pretrained(folder)

    rng = np.random.default_rng(seed)

    def normal(*shape):
        return (rng.standard_normal(shape) * 0.1).astype(np.float32)

    ones, layer = np.ones, "model.layers.0."
    attention = 2 * HEAD_DIM
    save_file(
        {
            "model.embed_tokens.weight": normal(VOCAB, HIDDEN),
            "lm_head.weight": normal(VOCAB, HIDDEN),
            "model.norm.weight": ones(HIDDEN, np.float32),
            layer + "input_layernorm.weight": ones(HIDDEN, np.float32),
            layer + "post_attention_layernorm.weight": ones(HIDDEN, np.float32),
            layer + "self_attn.q_norm.weight": ones(HEAD_DIM, np.float32),
            layer + "self_attn.k_norm.weight": ones(HEAD_DIM, np.float32),
            layer + "self_attn.q_proj.weight": normal(attention, HIDDEN),
            layer + "self_attn.k_proj.weight": normal(attention, HIDDEN),
            layer + "self_attn.v_proj.weight": normal(attention, HIDDEN),
            layer + "self_attn.o_proj.weight": normal(HIDDEN, attention),
            layer + "mlp.gate_proj.weight": normal(HIDDEN, HIDDEN),
            layer + "mlp.up_proj.weight": normal(HIDDEN, HIDDEN),
            layer + "mlp.down_proj.weight": normal(HIDDEN, HIDDEN),
        },
        folder / "model.safetensors",
    )
    return folder


def server_args(checkpoint: Path, **changes):
    """Return the ServerArgs of a small engine on the CPU platform."""
    from sgl_jax.srt.server_args import ServerArgs

    return ServerArgs(
        **{
            "model_path": str(checkpoint),
            "device": "cpu",
            "dtype": "float32",
            "attention_backend": "native",
            "disable_hybrid_swa_memory": True,
            "max_total_tokens": 512,
            "max_running_requests": 4,
            "max_prefill_tokens": 64,
            "chunked_prefill_size": 64,
            "context_length": 128,
            "page_size": 1,
            "disable_overlap_schedule": True,
            "disable_precompile": True,
            # One shape, so that no test compiles a program that another test has patched.
            "precompile_bs_paddings": [4],
            "precompile_token_paddings": [64],
            "grammar_backend": "none",
            "log_level": "error",
            **changes,
        }
    )


class _Inbox:
    """Upstream's communication backend. It hands over the requests that were put in, and keeps
    the results."""

    def __init__(self):
        self.requests = []
        self.stop_when = lambda: True

    def recv_requests(self):
        if not self.requests and self.stop_when():
            # A BaseException, because upstream's loop turns any Exception into a SIGQUIT.
            raise SystemExit
        requests, self.requests = self.requests, []
        return requests

    def send_pyobj(self, message):
        pass

    def wait_for_new_requests(self, timeout):
        pass


class Upstream:
    """One real Scheduler on one device; `run` executes its loop until all requests finished."""

    def __init__(self, checkpoint: Path, device_index: int = 0, **changes):
        import jax
        from jax.sharding import AxisType, Mesh

        from patches._lookup import module

        device = jax.devices()[device_index]
        mesh = Mesh(
            np.array([device]).reshape(1, 1),
            ("data", "tensor"),
            axis_types=(AxisType.Explicit,) * 2,
        )
        self.inbox = _Inbox()
        args = server_args(checkpoint, device_indexes=[device_index], **changes)

        class Scheduler(module("sgl_jax.srt.managers.scheduler").Scheduler):
            def watchdog_thread(self):
                """Between two runs no step is made. After five minutes without one, upstream's
                watchdog would end pytest's parent process, which is make."""

        with jax.default_device(device):
            self.scheduler = Scheduler(args, communication_backend=self.inbox, mesh=mesh)

    def run(self, prompts, params, outputs=None, iterations=None):
        """Return the output ids of each prompt.

        Args:
            prompts: Lists of token ids.
            params: Sampling parameters, one dict for all or one per prompt.
            outputs: Output ids that each request has when it is admitted.
            iterations: How often upstream's loop may go round; what has not finished is aborted.
        """
        from sgl_jax.srt.managers.io_struct import AbortReq, TokenizedGenerateReqInput
        from sgl_jax.srt.sampling.sampling_params import SamplingParams

        if isinstance(params, dict):
            params = [params] * len(prompts)
        fields = {field.name for field in dataclasses.fields(TokenizedGenerateReqInput)}
        admitted = []
        queue = self.scheduler._add_request_to_queue

        def admit(req, *args, **kwargs):
            if outputs is not None:
                req.output_ids = list(outputs[len(admitted)])
            admitted.append(req)
            return queue(req, *args, **kwargs)

        for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            sampling = SamplingParams(ignore_eos=True, **one)
            sampling.normalize(None)
            extra = {"radix_input_ids": list(prompt)} if "radix_input_ids" in fields else {}
            self.inbox.requests.append(
                TokenizedGenerateReqInput(
                    rid=f"request-{index}",
                    text="",
                    input_ids=list(prompt),
                    sampling_params=sampling,
                    return_logprob=False,
                    return_output_logprob_only=False,
                    logprob_start_len=-1,
                    top_logprobs_num=0,
                    **extra,
                )
            )
        rounds = itertools.count()

        def stop():
            return self.scheduler._can_flush_cache()[0] or next(rounds) == iterations

        self.inbox.stop_when = stop
        self.scheduler._add_request_to_queue = admit
        try:
            with contextlib.suppress(SystemExit):
                self.scheduler.event_loop_normal()
        finally:
            del self.scheduler._add_request_to_queue
        for req in admitted:
            if not req.finished():
                self.scheduler.abort_request(AbortReq(rid=req.rid))
        # A prefix in the radix cache would change the shapes of the next run.
        self.scheduler.flush_cache()
        return [list(req.output_ids) for req in admitted]
