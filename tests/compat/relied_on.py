"""Every name, parameter and attribute of SGLang's that the plugin relies on, and what it does where one is missing."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from tests.compat.sources import Sources

SRT = "sglang.srt"


@dataclass(frozen=True)
class Need:
    """One thing relied on.

    Attributes:
        what: as the table names it.
        user: the module of this project that relies on it.
        there: whether a version has it.
        without: what the plugin does where it is missing; empty where it needs it.
    """

    what: str
    user: str
    there: Callable[[Sources], bool]
    without: str = ""


def name(user: str, target: str, without: str = "") -> Need:
    """A name of a module, ``module:name``, or a member of a class, ``module:Class.member``."""
    module, _, path = target.partition(":")
    owner, _, member = path.partition(".")

    def there(sources: Sources) -> bool:
        if member:
            return member in sources.members(f"{SRT}.{module}", owner)
        return sources.find(f"{SRT}.{module}", owner) is not None

    return Need(f"`{module}:{path}`", user, there, without)


def members(user: str, target: str, names: Iterable[str], without: str = "") -> list[Need]:
    """Members of one class."""
    return [name(user, f"{target}.{member}", without) for member in names]


def parameters(user: str, target: str, names: Iterable[str]) -> list[Need]:
    """Parameters of one function or method."""
    module, _, path = target.partition(":")
    return [
        Need(
            f"`{module}:{path}({parameter}=)`",
            user,
            lambda sources, p=parameter: p in sources.parameters(f"{SRT}.{module}", path),
        )
        for parameter in names
    ]


def text(what: str, user: str, module: str, *words: str, without: str = "") -> Need:
    """Words that the source of a module or of a package has, where there is no name to look for."""

    def there(sources: Sources) -> bool:
        found = sources.text(f"{SRT}.{module}") + sources.texts(f"{SRT}.{module}")
        return all(word in found for word in words)

    return Need(what, user, there, without)


def arguments(user: str, names: Iterable[str], without: str = "") -> list[Need]:
    """Server arguments: fields of ``ServerArgs``, or of the groups that it is put together from, 0.5.20 and newer."""

    def there(sources: Sources, name: str) -> bool:
        own = sources.members(f"{SRT}.server_args", "ServerArgs")
        return name in own or name in sources.fields(f"{SRT}.arg_groups.fields")

    return [Need(f"server argument `{name}`", user, partial(there, name=name), without) for name in names]


def server_arguments() -> list[Need]:
    """The settings that guards and launch read."""
    checked = (
        "model_path chunked_prefill_size max_prefill_tokens disable_radix_cache enable_hierarchical_cache "
        "enable_mixed_chunk enable_two_batch_overlap attn_cp_size dcp_size speculative_algorithm enable_lora "
        "lora_paths enable_pdmux disaggregation_mode enable_dp_attention dp_size"
    )
    filled_in = (
        "max_total_tokens max_running_requests enable_multimodal dtype attention_backend sleep_on_idle tp_size pp_size"
    )
    flags = "model_impl disable_prefill_cuda_graph skip_tokenizer_init json_model_override_args"
    return [
        *arguments("compat.py", [*checked.split(), "served_model_name"]),
        *arguments("compat.py", ["attn_dp_size"], "taken as 1: `enable_dp_attention` says it"),
        *arguments("compat.py", ["enable_return_aux_hidden_states"], "taken as off: there is no such mode"),
        *arguments("platform/", filled_in.split()),
        *arguments("driver/launch.py", flags.split()),
    ]


def models() -> list[Need]:
    """The classes that are captured from, and their parts."""
    v2, kimi = "models.deepseek_v2", "models.kimi_k25"
    forward = ["input_ids", "positions", "forward_batch"]
    return [
        *parameters("models/", f"{v2}:DeepseekV2ForCausalLM.forward", forward),
        *members("models/", f"{v2}:DeepseekV2ForCausalLM", ["model"]),
        name("models/", f"{v2}:DeepseekV3ForCausalLM"),
        name("models/", f"{v2}:DeepseekV32ForCausalLM"),
        *members("models/", f"{v2}:DeepseekV2Model", ["layers", "norm", "start_layer", "end_layer"]),
        *parameters("capture/taps.py", f"{v2}:DeepseekV2DecoderLayer.forward", ["captured_last_layer_outputs"]),
        *parameters("models/", f"{kimi}:KimiK25ForConditionalGeneration.forward", forward),
        *members("models/", f"{kimi}:KimiK25ForConditionalGeneration", ["language_model"]),
        *parameters("capture/taps.py", "layers.layernorm:RMSNorm.forward_native", ["residual"]),
        text(
            "a collector's `capture(hidden, owned=)` is called",
            "capture/taps.py",
            "layers",
            ".capture(",
            "owned=",
            without="`append(hidden)` with `copies_on_append` is there too",
        ),
        text("`EntryClass` of an external package", "models/", "models.registry", "EntryClass"),
        text("`SGLANG_EXTERNAL_MODEL_PACKAGE`", "driver/launch.py", "environ", "SGLANG_EXTERNAL_MODEL_PACKAGE"),
    ]


def state() -> list[Need]:
    """What is read of SGLang's state while it runs."""
    batch = (
        "forward_mode rids extend_prefix_lens_cpu extend_seq_lens_cpu input_ids out_cache_loc orig_seq_lens "
        "req_pool_indices"
    )
    info, config = "model_executor.forward_batch_info", "configs.model_config"
    graphs = "model_executor.cuda_graph_config"
    context = "runtime_context"
    return [
        *(
            name("compat.py", f"{context}:{function}")
            for function in ("get_server_args", "get_parallel", "get_serving")
        ),
        text("`get_parallel().attn_tp_rank`, `.pp_rank`", "compat.py", context, "attn_tp_rank", "pp_rank"),
        text(
            "`get_parallel().dp_rank`",
            "compat.py",
            context,
            "dp_rank",
            without="taken as 0, and `--dp-size` above 1 is refused",
        ),
        text("`get_parallel().attn_dp_rank`, `.attn_dp_size`", "compat.py", context, "attn_dp_rank", "attn_dp_size"),
        text("`ForwardBatch._original_forward_mode`", "compat.py", info, "_original_forward_mode"),
        name("platform/", "layers.attention.attention_registry:register_attention_backend"),
        *members("compat.py", f"{config}:ModelConfig", ["from_server_args", "context_len", "attention_arch"]),
        *members("compat.py", f"{config}:AttentionArch", ["MLA"]),
        *parameters("compat.py", f"{graphs}:check_cuda_graph_backend", ["phase", "backend"]),
        *members("compat.py", f"{graphs}:Phase", ["PREFILL"]),
        *members("compat.py", f"{graphs}:Backend", ["DISABLED"]),
        *members("compat.py", f"{info}:ForwardMode", ["EXTEND"]),
        *members("compat.py", f"{info}:ForwardBatch", batch.split()),
        *members(
            "compat.py", f"{info}:ForwardBatch", ["out_cache_loc_virtual"], "`out_cache_loc` holds the slots themselves"
        ),
        name("compat.py", "model_executor.forward_context:get_req_to_token_pool"),
        *members("compat.py", "mem_cache.memory_pool:ReqToTokenPool", ["req_to_token"]),
        name("compat.py", "models.registry:ModelRegistry"),
        text("`ModelRegistry.resolve_model_cls`", "compat.py", "models.registry", "def resolve_model_cls"),
        *members(
            "driver/client.py",
            "managers.io_struct:GenerateReqInput",
            ["rid", "input_ids", "sampling_params", "extra_key"],
        ),
        text("`/generate`, `/health`", "driver/client.py", "entrypoints.http_server", '"/generate"', '"/health"'),
        text(
            "`/server_info`",
            "driver/client.py",
            "entrypoints.http_server",
            '"/server_info"',
            without="`/get_server_info` is asked",
        ),
    ]


def platform() -> list[Need]:
    """The CPU platform's bases and what it registers."""
    interface, handler = "platforms.interface", "models.deepseek_common.attention_backend_handler"
    methods = (
        "get_device get_default_attention_backend get_dispatch_key_name get_compile_backend apply_server_args_defaults "
        "init_backend get_paged_allocator_cls"
    )
    pool = "not asked for"
    forward = "models.deepseek_common.attention_forward_methods.forward_methods:AttnForwardMethod"
    return [
        name("platform/", "platforms.cpu:CpuDeviceMixin"),
        *members("platform/", f"{interface}:SRTPlatform", methods.split()),
        *members("platform/", f"{interface}:SRTPlatform", ["get_kv_pool_cls"], pool),
        *members("platform/", f"{interface}:SRTPlatform", ["get_mla_kv_pool_cls"], pool),
        *members("platform/", f"{interface}:PlatformEnum", ["OOT"]),
        *members("platform/", f"{handler}:AttentionBackendRegistry", ["register"]),
        *members("platform/", forward, ["MLA"]),
        name("platform/", "mem_cache.memory_pool:MLATokenToKVPool"),
        name("platform/", "mem_cache.allocator.token:TokenToKVPoolAllocator", pool),
    ]


NEEDS = [*server_arguments(), *models(), *state(), *platform()]
