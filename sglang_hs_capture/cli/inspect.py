"""``hs-capture inspect``: what a dataset holds, for a person or as JSON."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from sglang_hs_capture.cli import live
from sglang_hs_capture.cli.tell import tell
from sglang_hs_capture.driver.summary import GB
from sglang_hs_capture.errors import ConfigError
from sglang_hs_capture.layers import draft_ids, output_of_layer_ids
from sglang_hs_capture.store.index import DatasetIndex, load_index
from sglang_hs_capture.store.schema import FLOAT8, DatasetInfo, all_zero
from sglang_hs_capture.store.session import is_running, read_sessions
from sglang_hs_capture.text import printable

SHOWN_REASONS = 5
SHOWN_IDS, KEPT_IDS = 5, 100


def inspect(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The dataset.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show how a capture into it goes on, until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, max=86400, help="With --watch: seconds between two looks.")] = 2.0,
) -> None:
    """Show what a dataset holds, and which layer ids a draft model's config needs."""
    if watch:
        if as_json:
            raise ConfigError("--watch and --json: give one of them")
        live.watch(directory, Console(), interval)
        return
    account = describe(directory, load_index(directory))
    if as_json:
        typer.echo(json.dumps(account, indent=2))
        return
    for line in lines(account):
        tell(line)


def describe(directory: Path, index: DatasetIndex) -> dict[str, Any]:
    """The account of a dataset, ready for JSON."""
    info = index.info
    # Stages of a pipeline store each row's columns apart: a row is counted where its first column is.
    rows = sum(entry.state.rows for entry in index.shards if info.columns[0] in entry.state.record.columns)
    size = sum(entry.state.rows * len(entry.state.record.columns) for entry in index.shards) * info.column_bytes
    used = _used_rows(index)
    tokens = sum(sample.length for sample in index.samples)
    masked = [sample.id for sample in index.samples if all_zero(sample.loss_mask_rle)]
    finished = sum(entry.state.finished for entry in index.shards)
    return {
        "path": str(directory),
        "model": {
            "path": info.model_path,
            "architecture": info.architecture,
            "config_hash": info.config_hash,
            "num_layers": info.num_layers,
            "hidden_size": info.hidden_size,
            "final_norm_eps": info.final_norm_eps,
        },
        "boundaries": list(info.boundaries),
        "columns": list(info.columns),
        "dtype": info.dtype,
        "created_at": info.created_at,
        "sglang_version": info.sglang_version,
        "samples": len(index.samples),
        "tokens": tokens,
        "images": {
            "samples": sum(sample.media is not None for sample in index.samples),
            "tokens": sum(sample.media.positions for sample in index.samples if sample.media),
        },
        "rows": rows,
        "rows_without_sample": rows - used,
        # The share of the samples' tokens whose row was there; in compute, less what was computed in vain.
        "reused": {"disk": _share(tokens - used, tokens), "compute": _share(tokens - rows, tokens)},
        "bytes": size,
        "shards": {"finished": finished, "unfinished": len(index.shards) - finished},
        "scale_bytes": sum(entry.state.rows * len(entry.state.record.columns) for entry in index.shards)
        * info.scale_bytes,
        "requests": {
            "asked": len(index.requested),
            "pending": len(index.pending),
            "dropped": len(index.dropped),
            "failed": len(index.failed),
            "mismatched": len(index.mismatched),
            "unclaimed": len(index.unclaimed),
        },
        "pending_ids": list(index.pending[:KEPT_IDS]),
        "reasons": _reasons(index),
        # Such a sample is stored and read, and nothing is learned from it.
        "zero_loss_masks": {"count": len(masked), "ids": masked[:KEPT_IDS]},
        "draft_ids": {**draft_ids(info.boundaries), "final": _final_ids(info)},
        "sessions": [
            {
                "writer": record.writer,
                "state": record.state,
                "running": is_running(record),
                "error": record.error,
                "updated_at": record.updated_at,
                "counters": vars(record.counters),
            }
            for record in read_sessions(directory)
        ],
    }


def _share(part: int, whole: int) -> float:
    return round(max(0, part) / whole, 6) if whole else 0.0


def _final_ids(info: DatasetInfo) -> dict[str, int]:
    """How those name the final state that list it among the layers."""
    return {"boundary": info.num_layers, "output_of_layer": output_of_layer_ids([info.num_layers])[0]}


def _reasons(index: DatasetIndex) -> dict[str, int]:
    """How often samples were given up or failed, by reason, the most frequent first."""
    given_up = [record.reason for record in index.dropped] + [entry.reason for entry in index.failed]
    return dict(Counter(given_up).most_common())


def _used_rows(index: DatasetIndex) -> int:
    """Rows that belong to at least one sample; a row shared by several counts once."""
    extents: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
    for sample in index.samples:
        for part in sample.parts:
            if index.info.columns[0] not in part.columns:
                continue
            for shard, start, count in part.extents:
                extents[part.writer, shard].append((start, start + count))
    return sum(_covered(ranges) for ranges in extents.values())


def _covered(ranges: Iterable[tuple[int, int]]) -> int:
    total, reached = 0, 0
    for start, end in sorted(ranges):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def lines(account: dict[str, Any]) -> list[str]:
    """The account for a person."""
    model, requests, shards = account["model"], account["requests"], account["shards"]
    share = account["rows_without_sample"] / account["rows"] if account["rows"] else 0.0
    scales = " with a scale for each row and state" if account["dtype"] == FLOAT8 else ""
    images = ""
    if account["images"]["samples"]:
        images = f", {account['images']['samples']:,} with images ({account['images']['tokens']:,} of the tokens)"
    shown = [
        f"Dataset      {account['path']}",
        f"Model        {model['path']} ({model['architecture']})",
        f"             {model['num_layers']} layers of {model['hidden_size']} elements",
        f"Captured by  SGLang {account['sglang_version']}, from {account['created_at']}",
        f"States       {', '.join(account['columns'])}, {account['dtype']}{scales}",
        f"Samples      {account['samples']:,} ({account['tokens']:,} tokens){images}",
        f"Rows         {account['rows']:,} ({account['bytes'] / GB:.3f} GB), {share:.1%} of them in no sample",
        f"Reused       {account['reused']['compute']:.1%} of the samples' tokens in compute, "
        f"{account['reused']['disk']:.1%} on disk: their prefix was there from another sample",
        f"Shards       {shards['finished']:,} finished, {shards['unfinished']:,} unfinished",
        f"Requests     {requests['asked']:,} asked for, {requests['pending']:,} still missing, "
        f"{requests['dropped']:,} dropped, {requests['failed']:,} failed, {requests['mismatched']:,} of other tokens",
    ]
    if requests["pending"]:
        shown.append(f"  still missing: {_ids(account['pending_ids'], requests['pending'])}; run again to capture them")
    if zero := account["zero_loss_masks"]["count"]:
        shown.append(
            f"  {zero:,} captured samples have a loss mask of zeros only, so that nothing is learned from them: "
            f"{_ids(account['zero_loss_masks']['ids'], zero)}"
        )
    if requests["unclaimed"]:
        shown.append(
            f"  {requests['unclaimed']:,} captured samples are not in requests.jsonl, so that their ids and loss masks "
            "are lost: restore that file, or run again to capture them anew"
        )
    shown += [f"  {count:,} x {reason}" for reason, count in list(account["reasons"].items())[:SHOWN_REASONS]]
    for session in account["sessions"]:
        reason = live.reason(session["state"], session["error"], session["running"])
        counters = session["counters"]
        shown.append(
            f"Session      {session['writer']} {session['state']}{reason} ({counters['rows']:,} rows, "
            f"{counters['samples']:,} samples, ring full {counters['blocked_s']:.1f} s, "
            f"{counters['incomplete']:,} times a prefix could not be proven, "
            f"{(counters['ring_bytes'] + counters['slot_table_bytes']) / GB:.2f} GB of host memory, "
            f"{session['updated_at']})"
        )
    return shown + _draft_lines(account["draft_ids"])


def _ids(ids: list[str], count: int) -> str:
    """The first few of ``count`` ids."""
    named = ", ".join(printable(repr(id)) for id in ids[:SHOWN_IDS])
    return f"{named} and {count - SHOWN_IDS:,} more" if count > SHOWN_IDS else named


def _draft_lines(ids: dict[str, Any]) -> list[str]:
    final = ids["final"]
    shown = ["", "Layer ids for a draft model's config, by who reads them:"]
    if "sglang" in ids:
        setting = json.dumps({"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids["sglang"]}})
        shown.append(f"  SGLang 0.5.17 to 0.5.23              {setting}")
    else:
        shown.append("  SGLang                               cannot serve a draft model whose first boundary is 1")
    if "output_of_layer" in ids:
        shown.append(
            f"  SpecForge, ModelOpt, speculators 0.4 {ids['output_of_layer']}, final {final['output_of_layer']}"
            '  ("output of layer i")'
        )
    shown.append(f"  vLLM, speculators 0.9                {ids['boundary']}, final {final['boundary']}  (boundaries)")
    return shown
