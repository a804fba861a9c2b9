"""The guards on SGLang's own configuration object: a JSON list of flags a line in, an answer a line out.

An answer is ``["refused", TEXT]`` by the guards, ``["sglang", TEXT]`` where SGLang itself refuses the flags before, or
``["passed", ""]``. Run in a process of its own with the CPU platform: python -m tests.compat.config_object
"""

import copy
import json
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from sglang.srt import runtime_context
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.server_args import prepare_server_args

from sglang_hs_capture.capture.guards import check_engine
from sglang_hs_capture.compat import engine_settings
from sglang_hs_capture.errors import GuardError

PREFILL_GRAPH = "PREFILL_GRAPH"


@contextmanager
def prefill_graph(wanted: bool) -> Iterator[None]:
    """The prefill graph on, which the CPU platform never has."""
    if not wanted:
        yield
        return
    config = copy.deepcopy(runtime_context.get_exec().graph.cuda_graph_config)
    config.prefill.backend = Backend.BREAKABLE
    with runtime_context.get_exec().graph.override(cuda_graph_config=config):
        yield


def judge(flags: list[str]) -> tuple[str, str]:
    """What becomes of a server with these flags; ``PREFILL_GRAPH`` among them turns that on, as a GPU's default is."""
    try:
        args = prepare_server_args([flag for flag in flags if flag != PREFILL_GRAPH])
        args.resolve_once()
        runtime_context.get_context().set_server_args(args)
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        return "sglang", f"{type(error).__name__}: {error}"
    try:
        # SGLang states the replica when it starts the model's process.
        with runtime_context.get_parallel().override(dp_rank=None), prefill_graph(PREFILL_GRAPH in flags):
            check_engine(engine_settings())
    except GuardError as error:
        return "refused", str(error)
    return "passed", ""


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(judge(json.loads(line))), flush=True)
