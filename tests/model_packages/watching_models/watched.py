"""Kimi-K2.5 that captures, and after each forward compares SGLang's modules with what they held before the plugin came.

The report goes to ``HS_WATCH_FILE``: the number of names compared, of prefills seen, and the names whose object has
changed.
"""

import json
import os
import sys
from functools import wraps
from pathlib import Path
from types import FunctionType
from typing import Any

from sglang.srt.models import deepseek_v2, kimi_k25  # noqa: F401 - loaded before the snapshot, so that it holds them


def snapshot() -> dict[str, int]:
    """Identities of every class and function of SGLang's loaded modules, and of every attribute of these classes."""
    found: dict[str, int] = {}
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith("sglang.") or module is None:
            continue
        for name, value in list(vars(module).items()):
            if isinstance(value, type) and value.__module__.startswith("sglang."):
                found[f"{module_name}.{name}"] = id(value)
                for attribute, member in list(vars(value).items()):
                    if isinstance(member, FunctionType | classmethod | staticmethod | property):
                        found[f"{module_name}.{name}.{attribute}"] = id(member)
            elif isinstance(value, FunctionType):
                found[f"{module_name}.{name}"] = id(value)
    return found


BEFORE = snapshot()

from sglang_hs_capture.models import kimi_k25 as capturing  # noqa: E402


class KimiK25ForConditionalGeneration(capturing.KimiK25ForConditionalGeneration):
    """Reports after each prefill."""

    prefills = 0

    @wraps(capturing.KimiK25ForConditionalGeneration.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result = super().forward(*args, **kwargs)
        self.prefills += 1
        after = snapshot()
        changed = sorted(name for name, identity in BEFORE.items() if after.get(name) != identity)
        report = {"compared": len(BEFORE), "prefills": self.prefills, "changed": changed}
        Path(os.environ["HS_WATCH_FILE"]).write_text(json.dumps(report))
        return result


EntryClass = [KimiK25ForConditionalGeneration]
