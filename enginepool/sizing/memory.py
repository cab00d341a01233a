"""How an engine fills a chip's HBM.

Upstream sizes its KV cache by `mem_fraction_static` of the memory that is free before the weights
are loaded: weights and KV together take that fraction. Everything else must fit in the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from enginepool.sizing.settings import Settings
from enginepool.sizing.shape import Shape

# Temporaries, as XLA's compiler reported them for v5e and v6e, rounded up. Prefill of 4,096 tokens
# of Qwen3-4B took 226 MB: for each token 8.1 hidden states, and gate and up of the MLP. The sampler
# took 4.1 to 5.1 times its logits.
_HIDDEN_STATES = 9
_SAMPLER_COPIES = 6
# Temporaries of a layer in programs that score or decode steadily. The compiler reported for v5e:
# 2.2 MB for Qwen3-0.6B, 1.4 MB for Qwen3-4B. No array has that size; the cause is not known.
_LAYER_TEMPORARIES = 2_200_000
# The largest program of a full-depth model that the compiler reported.
_PROGRAM_BYTES = 23 * 10**6


def _buckets(paddings: tuple[int, ...], least: int, most: int) -> set[int]:
    """The sizes that a batch is padded to."""
    return {size for size in paddings if least <= size < most} | {most}


def running_requests_cap(context: int, page_size: int) -> int:
    """The most requests that upstream's attention can run: their page numbers lie in scalar memory.

    See sglang-jax 0.1.0rc0, srt/layers/attention/flashattention_backend.py:771. If the result is 0,
    an assertion fails while the engine is built.
    """
    return 524_288 // -(-context // page_size) // 4


@dataclass(frozen=True)
class StepPrograms:
    """The programs of a step on one chip, as the compiler describes them. Sizes in bytes.

    Attributes:
        count: The number of forward programs.
        code: The size of all programs of a step.
        logits: The largest input and output of the sampler.
    """

    count: int
    code: int
    prefill_temporaries: int
    sampler_temporaries: int
    logits: int


@dataclass(frozen=True)
class Memory:
    """The memory of one chip of an engine, in bytes unless it says tokens or requests.

    Attributes:
        free: The free HBM of the chip when the engine is built.
        compiled: The compiler's figures, used instead of estimates.
    """

    shape: Shape
    settings: Settings
    free: int
    compiled: StepPrograms | None = None

    @cached_property
    def weights(self) -> int:
        return self.shape.weight_bytes(self.settings.tp_size)

    @cached_property
    def adapter_slot(self) -> int:
        """The bytes of a slot for an adapter."""
        settings = self.settings
        if not settings.lora_targets:
            return 0
        return self.shape.adapter_bytes(settings.lora_rank, settings.lora_targets, settings.tp_size)

    @property
    def adapters(self) -> int:
        """The bytes of all slots."""
        return self.adapter_slot * self.settings.lora_slots

    @cached_property
    def kv_per_token(self) -> int:
        return self.shape.kv_bytes_per_token(self.settings.tp_size, self.settings.kv_itemsize)

    def tokens_at(self, fraction: float) -> int:
        """The KV tokens that upstream allocates at this `mem_fraction_static`, in whole pages."""
        taken = self.weights + self.adapters
        tokens = max(0, int((self.free * fraction - taken) // self.kv_per_token))
        most = self.settings.max_total_tokens
        tokens = tokens if most is None else min(tokens, most)
        return tokens // self.settings.page_size * self.settings.page_size

    @cached_property
    def kv_tokens(self) -> int:
        return self.tokens_at(self.settings.fraction)

    def kv_at(self, fraction: float) -> int:
        """Bytes of the KV cache. Upstream allocates a page more than it uses."""
        return (self.tokens_at(fraction) + self.settings.page_size) * self.kv_per_token

    @property
    def kv(self) -> int:
        return self.kv_at(self.settings.fraction)

    @property
    def requests_at_context(self) -> int:
        """How many requests of full context fit at the same time."""
        return self.kv_tokens // self.settings.tokens_per_request

    @property
    def cap(self) -> int:
        return running_requests_cap(self.settings.context, self.settings.page_size)

    @property
    def max_running_requests(self) -> int:
        """The running requests, computed as in upstream (tp_worker.py). The option, the request
        pool and the attention limit them.
        """
        asked = self.settings.max_running_requests
        if asked is not None:
            return min(asked, self.cap)
        pool = min(max(int(self.kv_tokens / self.settings.context * 512), 2048), 4096)
        return min(self.kv_tokens // 2, pool, self.cap)

    # Memory beside weights and KV

    @property
    def largest_batch(self) -> int:
        """The largest decode batch that is compiled."""
        return min(self.max_running_requests, self.settings.chunk)

    @property
    def logits(self) -> int:
        if self.compiled is not None:
            return self.compiled.logits
        return self.largest_batch * self.shape.vocab * 4

    @property
    def prefill_temporaries(self) -> int:
        if self.compiled is not None:
            return self.compiled.prefill_temporaries
        shape, tp_size = self.shape, self.settings.tp_size
        mlp = 2 * shape.mlp_width // tp_size
        a_token = (_HIDDEN_STATES * shape.hidden + mlp) * shape.itemsize
        return max(self.settings.chunk * a_token, shape.layers * _LAYER_TEMPORARIES)

    @property
    def sampler_temporaries(self) -> int:
        if self.compiled is not None:
            return self.compiled.sampler_temporaries
        return _SAMPLER_COPIES * self.logits

    @property
    def tallies(self) -> int:
        """The counts of output ids for penalties, which steady decode keeps on the device."""
        steady = not (self.shape.window and self.settings.hybrid_swa)
        return self.largest_batch * self.shape.vocab * 4 if steady else 0

    @property
    def program_count(self) -> int:
        """Forward programs: one for each bucket of decode requests and of prefill tokens."""
        if self.compiled is not None:
            return self.compiled.count
        decode = len(_buckets(self.settings.batch_paddings, 1, self.largest_batch))
        tokens = self.settings.token_paddings
        return decode + len(_buckets(tokens, self.largest_batch, self.settings.chunk))

    @property
    def programs(self) -> int:
        if self.compiled is not None:
            return self.compiled.code
        return self.program_count * _PROGRAM_BYTES

    @property
    def reserve(self) -> int:
        """Programs, logits, counts for penalties, and the larger of the two temporaries.

        A steady step needs both temporaries at once. Each estimate is well above the compiler's
        figure, so the larger one is enough.
        """
        temporaries = max(self.prefill_temporaries, self.sampler_temporaries)
        return self.programs + self.logits + self.tallies + temporaries

    # Checks of what fits

    @property
    def serves(self) -> bool:
        """Whether an engine starts and can run one request of the whole context."""
        runs = min(self.requests_at_context, self.max_running_requests) >= 1
        return runs and self._fits(1, self.settings.fraction)

    @property
    def second_set_fits(self) -> bool:
        """Whether a second weight set fits while engines serve (`staging="double"`)."""
        return self._fits(2, self.settings.fraction)

    @property
    def second_set_fits_without_kv(self) -> bool:
        """Whether a second weight set fits while the KV cache is released and no program runs
        (`free_kv=True`)."""
        return 2 * self.weights + self.adapters + self.programs <= self.free

    @property
    def live_swap_fraction(self) -> float | None:
        """The largest `mem_fraction_static` at which a second set fits while engines serve."""
        return self.largest_fraction(sets=2)

    def largest_fraction(self, sets: int) -> float | None:
        """The largest `mem_fraction_static`, in hundredths, at which this many weight sets fit
        beside the reserve. None if none leaves a page of KV."""
        for fraction in (hundredths / 100 for hundredths in range(99, 0, -1)):
            if self._fits(sets, fraction):
                return fraction if self.tokens_at(fraction) else None
        return None

    @property
    def least_fraction(self) -> float | None:
        """The smallest `mem_fraction_static`, in hundredths, with KV for one request of the whole
        context. None if there is none.
        """
        wanted = self.settings.tokens_per_request
        each = (hundredths / 100 for hundredths in range(1, 100))
        return next((one for one in each if self.tokens_at(one) >= wanted), None)

    def _fits(self, sets: int, fraction: float) -> bool:
        weights = sets * self.weights + self.adapters
        return weights + self.kv_at(fraction) + self.reserve <= self.free
