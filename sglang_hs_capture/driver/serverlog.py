"""Finds, in a server's log, the few lines that say why it died."""

import re
from pathlib import Path

READ_BYTES = 2**20
FALLBACK_LINES = 3
LINE_LIMIT = 600

# The last line of a traceback; a log line would begin with its timestamp.
_RAISED = re.compile(r"^(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Interrupt|Exit)\b(?::.*)?$")
_ARGUMENT = re.compile(r"^\S.*: error: .+$")
_BLOCK = re.compile(r"hit an exception")
_CRASHED = re.compile(r"Subprocess \S+ \(pid=\d+\) crashed with exit code -?\d+")
_STAMPED = re.compile(r"^\[\d{4}-\d\d-\d\d ")
_NOT_LOADED = re.compile(r"Ignore import error when loading sglang_hs_capture\b.*")


def read_tail(path: Path, start: int = 0) -> list[str]:
    """The last lines of a log, none of them from before byte ``start``; empty if there is no log."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(start, size - READ_BYTES))
            return file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []


def cause_of_death(lines: list[str]) -> str:
    """The most telling lines, joined into one.

    SGLang logs the first failure as "... hit an exception:" and a traceback, and other processes then fail in its wake;
    so the end of the first such traceback is preferred to the last error in the log. Where there is none, a process was
    killed, which SGLang logs too.
    """
    found = _first_block(lines) or _first_crash(lines) or _last_match(lines, _RAISED) or _last_match(lines, _ARGUMENT)
    if found:
        return found[:LINE_LIMIT]
    kept = [line.strip() for line in lines if line.strip()][-FALLBACK_LINES:]
    return " | ".join(kept)[:LINE_LIMIT]


def import_warning(lines: list[str]) -> str:
    """SGLang's warning that the capture package did not import; empty if there is none."""
    for line in lines:
        if found := _NOT_LOADED.search(line):
            return found[0][:LINE_LIMIT]
    return ""


def _first_block(lines: list[str]) -> str:
    for index, line in enumerate(lines):
        if not _BLOCK.search(line):
            continue
        found = ""
        for follower in lines[index + 1 :]:
            if _STAMPED.match(follower):
                break
            if _RAISED.match(follower):
                found = follower
        if found:
            return found.strip()
    return ""


def _first_crash(lines: list[str]) -> str:
    return next((found[0] for line in lines if (found := _CRASHED.search(line))), "")


def _last_match(lines: list[str], pattern: re.Pattern[str]) -> str:
    return next((line.strip() for line in reversed(lines) if pattern.match(line)), "")
