"""Refuse to start in a mode of the engine in which captured states would be wrong or missing."""

from sglang_hs_capture.compat import EngineSettings
from sglang_hs_capture.errors import GuardError


def check_engine(settings: EngineSettings) -> None:
    """Check every setting that capture depends on.

    Raises:
        GuardError: one line for each setting that does not fit, naming the flag to change.
    """
    problems = [message for wrong, message in _rules(settings) if wrong]
    if problems:
        raise GuardError("; ".join(problems))


def _rules(s: EngineSettings) -> list[tuple[bool, str]]:
    return [
        (
            not s.is_mla,
            "SGLang does not recognise this model as multi-head latent attention, so it would compute other states: "
            "config.json must name the original architecture too, after the capture class (hs-capture prepare does)",
        ),
        (
            s.prefill_cuda_graph,
            "the prefill CUDA graph is on: it replays without running the model's forward, and nothing would be "
            "captured; add --disable-prefill-cuda-graph",
        ),
        (
            s.hierarchical_cache,
            "the hierarchical cache moves prefixes between slots unseen, so that their rows could not be found; remove "
            "--enable-hierarchical-cache",
        ),
        (s.mixed_chunk, "decode tokens would be mixed into prefill batches; remove --enable-mixed-chunk"),
        (s.two_batch_overlap, "two-batch overlap skips the capture of layer inputs; remove --enable-two-batch-overlap"),
        (
            s.context_parallel,
            "context parallelism spreads a prompt's rows over ranks; set --attn-cp-size and --dcp-size to 1",
        ),
        (
            s.speculative,
            "speculative decoding is on: capture states from the target model alone; remove --speculative-algorithm",
        ),
        (
            s.lora,
            "LoRA adapters would change the states from request to request; remove --enable-lora and --lora-paths",
        ),
        (s.pd_multiplexing, "prefill/decode multiplexing splits a forward by layers; remove --enable-pdmux"),
        (s.disaggregation, "prefill/decode disaggregation is on; set --disaggregation-mode null"),
        (
            s.aux_hidden_states,
            "SGLang's own --enable-return-aux-hidden-states captures the same layer inputs; remove it",
        ),
        (
            s.nameless_replicas,
            "this SGLang does not tell a model which data-parallel replica it is; set --dp-size to 1 and start one "
            "server for each replica with a dataset of its own, or install SGLang 0.5.23",
        ),
    ]
