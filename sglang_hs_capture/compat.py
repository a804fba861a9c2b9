"""All that differs between SGLang versions, and every read of SGLang's global state.

Written against 0.5.17 to 0.5.23. Nothing here replaces anything of SGLang's; it only reads.
"""

import importlib
import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_hs_capture.errors import EngineError, GuardError

OLDEST_TESTED = (0, 5, 17)
NEWEST_TESTED = (0, 5, 23)

# What the plugin relies on, as module:attribute. `hs-capture doctor` checks them on the SGLang at hand.
RELIED_ON = (
    "sglang.srt.runtime_context:get_server_args",
    "sglang.srt.runtime_context:get_parallel",
    "sglang.srt.runtime_context:get_serving",
    "sglang.srt.model_executor.forward_context:get_req_to_token_pool",
    "sglang.srt.model_executor.forward_batch_info:ForwardBatch",
    "sglang.srt.model_executor.cuda_graph_config:check_cuda_graph_backend",
    "sglang.srt.configs.model_config:ModelConfig.from_server_args",
    "sglang.srt.configs.model_config:AttentionArch.MLA",
    "sglang.srt.managers.schedule_batch:MultimodalDataItem",
    "sglang.srt.models.registry:ModelRegistry.resolve_model_cls",
    "sglang.srt.models.deepseek_v2:DeepseekV2ForCausalLM",
    "sglang.srt.models.deepseek_v2:DeepseekV3ForCausalLM",
    "sglang.srt.models.deepseek_v2:DeepseekV32ForCausalLM",
    "sglang.srt.models.kimi_k25:KimiK25ForConditionalGeneration",
)


def sglang_version() -> str:
    """The installed SGLang's version, without importing SGLang."""
    return importlib.metadata.version("sglang")


def version_tuple(version: str) -> tuple[int, ...]:
    """``"0.5.23.post1"`` -> ``(0, 5, 23)``: the leading numbers, for comparisons."""
    numbers = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers[:3])


def is_tested(version: str) -> bool:
    """Whether ``version`` lies in the range this release was tested with."""
    return OLDEST_TESTED <= version_tuple(version) <= NEWEST_TESTED


def missing_names() -> list[str]:
    """The names of ``RELIED_ON`` that the installed SGLang lacks, each with the reason; empty when all is well."""
    missing = []
    for target in RELIED_ON:
        module_name, _, path = target.partition(":")
        try:
            found: Any = importlib.import_module(module_name)
            for attribute in path.split("."):
                found = getattr(found, attribute)
        except Exception as error:
            missing.append(f"{target} ({type(error).__name__}: {error})")
    return missing


# SGLang runs a request that it refuses (a prompt too long for the context or the KV pool) all the same, under its own
# id, with this in place of its prompt.
REFUSED_PROMPT = (0,)


@dataclass(frozen=True)
class EngineSettings:
    """The engine's settings that decide whether captured states would be right. Sizes are in tokens."""

    model_path: str
    served_name: str
    context_length: int
    chunked_prefill_size: int
    max_prefill_tokens: int
    is_mla: bool
    radix_cache: bool
    hierarchical_cache: bool
    prefill_cuda_graph: bool
    mixed_chunk: bool
    two_batch_overlap: bool
    context_parallel: bool
    speculative: bool
    lora: bool
    pd_multiplexing: bool
    disaggregation: bool
    multimodal: bool
    aux_hidden_states: bool
    nameless_replicas: bool


def _read(args: Any, name: str, *, introduced: tuple[int, ...] | None = None, default: Any = None) -> Any:
    """Read a server argument; a name that is gone is an error, so that a renamed flag never counts as off."""
    if hasattr(args, name):
        return getattr(args, name)
    if introduced is not None and version_tuple(sglang_version()) < introduced:
        return default
    raise EngineError(
        f"SGLang {sglang_version()} has no server argument {name!r}, which this plugin must check; it was tested with "
        f"{'.'.join(map(str, OLDEST_TESTED))} to {'.'.join(map(str, NEWEST_TESTED))}: install one of these"
    )


def engine_settings() -> EngineSettings:
    """Read this process's engine settings; call it where a model is built.

    Raises:
        EngineError: an expected setting does not exist in this SGLang.
    """
    from sglang.srt.configs.model_config import AttentionArch, ModelConfig
    from sglang.srt.model_executor.cuda_graph_config import (
        Backend,
        Phase,
        check_cuda_graph_backend,
    )
    from sglang.srt.runtime_context import get_parallel, get_server_args, get_serving

    args = get_server_args()
    model_config = ModelConfig.from_server_args(args)
    attn_dp = int(_read(args, "attn_dp_size", introduced=(0, 5, 23), default=1) or 1)
    dp_attention = bool(_read(args, "enable_dp_attention")) or attn_dp > 1
    context_parallel = max(int(_read(args, name) or 1) for name in ("attn_cp_size", "dcp_size")) > 1
    return EngineSettings(
        model_path=str(_read(args, "model_path")),
        served_name=str(get_serving().served_model_name),
        context_length=int(model_config.context_len),
        chunked_prefill_size=int(_read(args, "chunked_prefill_size") or -1),
        max_prefill_tokens=int(_read(args, "max_prefill_tokens")),
        is_mla=model_config.attention_arch == AttentionArch.MLA,
        radix_cache=not _read(args, "disable_radix_cache"),
        hierarchical_cache=bool(_read(args, "enable_hierarchical_cache")),
        prefill_cuda_graph=not check_cuda_graph_backend(Phase.PREFILL, Backend.DISABLED),
        mixed_chunk=bool(_read(args, "enable_mixed_chunk")),
        two_batch_overlap=bool(_read(args, "enable_two_batch_overlap")),
        context_parallel=context_parallel,
        speculative=_read(args, "speculative_algorithm") is not None,
        lora=bool(_read(args, "enable_lora") or _read(args, "lora_paths")),
        pd_multiplexing=bool(_read(args, "enable_pdmux")),
        disaggregation=_read(args, "disaggregation_mode") != "null",
        multimodal=bool(model_config.is_multimodal),
        aux_hidden_states=bool(_read(args, "enable_return_aux_hidden_states", introduced=(0, 5, 23), default=False)),
        nameless_replicas=int(_read(args, "dp_size")) > 1 and not (dp_attention or hasattr(get_parallel(), "dp_rank")),
    )


@dataclass(frozen=True)
class Ranks:
    """Where this process stands: its place in its attention-TP group, its DP rank and its pipeline stage."""

    attn_tp_rank: int
    dp_rank: int
    pp_rank: int

    def writer(self, replica: int) -> str:
        """The name under which this process writes; ``replica`` tells servers of one dataset apart."""
        return f"dp{replica + self.dp_rank}-pp{self.pp_rank}"


def ranks() -> Ranks:
    """Read this process's ranks; call it where a model is built."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    # DP attention and replicas exclude each other. None without SGLang's data-parallel controller.
    replica = parallel.attn_dp_rank if parallel.attn_dp_size > 1 else getattr(parallel, "dp_rank", None)
    return Ranks(attn_tp_rank=int(parallel.attn_tp_rank), dp_rank=int(replica or 0), pp_rank=int(parallel.pp_rank))


def stage_layers(decoder: Any) -> range:
    """The decoder layers that this pipeline stage holds; all of them without pipeline parallelism.

    Args:
        decoder: a ``DeepseekV2Model``, whose ``layers`` has placeholders for those of other stages.
    """
    return range(int(decoder.start_layer), int(decoder.end_layer))


@dataclass(frozen=True)
class PrefillBatch:
    """A prefill batch as the capture needs it; tensors are SGLang's own and are borrowed.

    Attributes:
        rids: request ids, one a request.
        prefix_lens: tokens of each request computed before this forward.
        seq_lens: tokens of each request in this forward; their rows follow each other.
        input_ids: int64 ``[N]``, this forward's tokens; ``N >= sum(seq_lens)``.
        slots: int64 ``[N]``, the KV slot of each row.
        prompt_lens: int32 or int64 ``[B]``, each request's whole prompt length, on the device.
        req_pool_indices: ``[B]``, each request's line in ``req_to_token``.
        mm_inputs: SGLang's ``MultimodalInputs`` of each request, None for one without media; None where none has any.
    """

    rids: Sequence[str]
    prefix_lens: Sequence[int]
    seq_lens: Sequence[int]
    input_ids: torch.Tensor
    slots: torch.Tensor
    prompt_lens: torch.Tensor
    req_pool_indices: torch.Tensor
    mm_inputs: Sequence[Any] | None = None

    def images(self, index: int) -> list[tuple[int, int, tuple[int, ...]]]:
        """The images of a request's whole prompt, in order: first position, number of positions, and their ids.

        SGLang puts an image's ids at its positions in turn, beginning anew with each image: one id up to 0.5.17, four
        in 0.5.23. They are made from the image's content, so that its prefix cache tells images apart.
        """
        found = self.mm_inputs[index] if self.mm_inputs else None
        spans = []
        for item in found.mm_items if found is not None else ():
            ids = item.padding_values() if hasattr(item, "padding_values") else (item.pad_value,)
            for start, last in item.offsets:
                spans.append((int(start), int(last) - int(start) + 1, tuple(int(value) for value in ids)))
        return sorted(spans)


def prefill_batch(forward_batch: Any) -> PrefillBatch | None:
    """View a ``ForwardBatch`` as a prefill, or return None for every other kind of batch.

    Decode, idle, verify and graph-capture batches give None, as do warm-up batches, which carry no request ids.
    With DP attention a decode or idle batch may go by the name of a prefill while other ranks prefill, and any batch
    may be padded behind its requests and rows.
    """
    original = getattr(forward_batch, "_original_forward_mode", None) or forward_batch.forward_mode
    if forward_batch.forward_mode.name != "EXTEND" or original.name != "EXTEND" or not forward_batch.rids:
        return None
    count = len(forward_batch.rids)
    # Where the pool translates ids, req_to_token keeps the untranslated ones.
    virtual = getattr(forward_batch, "out_cache_loc_virtual", None)
    return PrefillBatch(
        rids=forward_batch.rids,
        prefix_lens=forward_batch.extend_prefix_lens_cpu[:count],
        seq_lens=forward_batch.extend_seq_lens_cpu[:count],
        input_ids=forward_batch.input_ids,
        slots=forward_batch.out_cache_loc if virtual is None else virtual,
        prompt_lens=forward_batch.orig_seq_lens[:count],
        req_pool_indices=forward_batch.req_pool_indices[:count],
        mm_inputs=getattr(forward_batch, "mm_inputs", None),
    )


def req_to_token() -> torch.Tensor:
    """The table ``[max_requests, max_context]`` of KV slots; valid inside a forward."""
    from sglang.srt.model_executor.forward_context import get_req_to_token_pool

    table: torch.Tensor = get_req_to_token_pool().req_to_token
    return table


def registered_class(architectures: Sequence[str]) -> type:
    """The class SGLang's registry gives for ``architectures`` in this process.

    Raises:
        GuardError: SGLang knows none of them.
    """
    from sglang.srt.models.registry import ModelRegistry

    try:
        model_class, _ = ModelRegistry.resolve_model_cls(list(architectures))
    except ValueError as error:
        raise GuardError(
            f"SGLang {sglang_version()} does not know the architectures {list(architectures)}: {error}"
        ) from None
    found: type = model_class
    return found
