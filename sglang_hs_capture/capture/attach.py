"""Set up capture on a model that SGLang has just built: settings, guards, taps and, on the writing rank, the store."""

import atexit
import logging
import os
import socket
import uuid
from pathlib import Path
from typing import Any

import torch

import sglang_hs_capture
from sglang_hs_capture import compat, layers
from sglang_hs_capture.capture.guards import check_engine
from sglang_hs_capture.capture.session import Capture, WritingCapture
from sglang_hs_capture.capture.taps import Taps
from sglang_hs_capture.config import CONFIG_KEY, CaptureConfig
from sglang_hs_capture.errors import ConfigError, HsCaptureError
from sglang_hs_capture.model_config import ModelConfig, load_model_config
from sglang_hs_capture.store.identity import model_identity
from sglang_hs_capture.store.schema import DatasetInfo
from sglang_hs_capture.store.session import SessionRecord, utc_now
from sglang_hs_capture.writing.reporter import SessionReporter

logger = logging.getLogger(__name__)


def attach(model: Any, decoder: Any, config: Any) -> Capture | None:
    """Prepare capture on a model.

    Args:
        model: the model SGLang builds.
        decoder: its ``DeepseekV2Model``, with ``layers`` and ``norm``.
        config: the model's config; its ``hs_capture`` object holds the settings.

    Returns:
        What to wrap each forward in; None when the config has no ``hs_capture``, so that nothing is captured.

    Raises:
        HsCaptureError: a setting is wrong, or the engine runs in a mode in which states would be wrong. The session
            record says the same before, for a driver in another process.
    """
    raw = getattr(config, CONFIG_KEY, None)
    if raw is None:
        logger.warning("hs_capture: the model's config has no %r object, so nothing is captured", CONFIG_KEY)
        return None
    try:
        capture_config = _settings(raw)
    except ConfigError as error:
        # Without settings it is not known where a session record would go.
        logger.error("hs_capture: refused to start: %s", error)
        raise
    place = compat.ranks()
    session = SessionRecord(
        writer=place.writer(capture_config.replica),
        session_id=uuid.uuid4().hex,
        pid=os.getpid(),
        host=socket.gethostname(),
        run_id=capture_config.run_id,
        rid_prefix=capture_config.rid_prefix,
        sglang_version=compat.sglang_version(),
        torch_version=torch.__version__,
        plugin_version=sglang_hs_capture.__version__,
    )
    try:
        return _attach(model, decoder, config, capture_config, place, session)
    except HsCaptureError as error:
        logger.error("hs_capture: refused to start: %s", error)
        if place.attn_tp_rank == 0:
            SessionReporter(Path(capture_config.output_dir), session).refused(error)
        raise


def _settings(raw: Any) -> CaptureConfig:
    config = CaptureConfig.from_mapping(raw)
    if not Path(config.output_dir).is_absolute():
        raise ConfigError(f"{CONFIG_KEY}.output_dir: expected an absolute path, got {config.output_dir!r}")
    return config


def _attach(
    model: Any, decoder: Any, config: Any, capture_config: CaptureConfig, place: compat.Ranks, session: SessionRecord
) -> Capture:
    settings = compat.engine_settings()
    check_engine(settings)
    text_config = getattr(config, "text_config", None) or config
    num_layers = int(text_config.num_hidden_layers)
    boundaries = layers.resolve_boundaries(capture_config.layers, num_layers)
    columns = layers.make_columns(boundaries, capture_config.final)
    mine = layers.stage_columns(columns, compat.stage_layers(decoder), num_layers)
    taps = Taps(decoder, mine)
    if place.attn_tp_rank != 0 or not mine:
        return Capture(taps, capture_config.rid_prefix)
    model_config = _model_config(settings.model_path)
    info = DatasetInfo(
        boundaries=boundaries,
        columns=tuple(column.name for column in columns),
        num_layers=num_layers,
        hidden_size=int(text_config.hidden_size),
        dtype=capture_config.dtype,
        model_path=settings.model_path,
        architecture=model_config.architecture,
        config_hash=model_config.config_hash,
        final_norm_eps=float(text_config.rms_norm_eps),
        created_at=utc_now(),
        sglang_version=compat.sglang_version(),
    )
    session.model = model_identity(info)
    session.columns = [column.name for column in mine]
    session.architecture_class = f"{type(model).__module__}.{type(model).__qualname__}"
    session.context_length = settings.context_length
    session.max_prompt_tokens = settings.context_length - 1
    session.chunked_prefill_size = settings.chunked_prefill_size
    session.prefix_cache = settings.radix_cache
    session.media_token = model_config.media_token if settings.multimodal else None
    session.draft_ids = layers.draft_ids(boundaries)
    chunk = settings.chunked_prefill_size
    capture = WritingCapture(
        taps,
        capture_config,
        info,
        mine,
        session=session,
        served_name=settings.served_name,
        media_token=session.media_token,
        device=next(model.parameters()).device,
        staging_rows=chunk if chunk > 0 else settings.max_prefill_tokens,
        norm=decoder.norm if any(column.final for column in mine) else None,
    )
    # A killed process loses nothing that was acknowledged; one that ends in order also finishes its shard.
    atexit.register(capture.close)
    logger.info(
        "hs_capture: capturing %s of requests %r* into %s", session.columns, capture_config.rid_prefix, session.writer
    )
    return capture


def _model_config(model_path: str) -> ModelConfig:
    """Read the config.json of a model directory, or of a hub model where SGLang has downloaded it."""
    if Path(model_path).is_dir():
        return load_model_config(model_path)
    from transformers.utils import cached_file

    found = cached_file(model_path, "config.json", local_files_only=True)
    if found is None:
        raise ConfigError(
            f"model: SGLang loaded {model_path!r}, but its config.json is not in the hub's cache here; give "
            "--model-path a directory"
        )
    return load_model_config(Path(found).parent)
