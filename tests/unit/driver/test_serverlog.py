"""What a server's log says about its end."""

from sglang_hs_capture.driver.serverlog import cause_of_death, import_warning, read_tail

SCHEDULER = """\
[2025-01-01 10:00:00] server_args=ServerArgs(model_path='/m')
[2025-01-01 10:00:05] Scheduler hit an exception: Traceback (most recent call last):
  File "scheduler.py", line 1, in run
    raise ValueError("inner")
ValueError: inner

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "model.py", line 2, in load
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB

[2025-01-01 10:00:06] SIGQUIT received. signum=None, frame=None. It usually means one child failed.
Traceback (most recent call last):
  File "launch_server.py", line 3, in <module>
RuntimeError: Rank 0 scheduler died during initialization
"""


def test_the_first_failure_is_preferred_to_those_in_its_wake():
    cause = cause_of_death(SCHEDULER.splitlines())
    assert cause == "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"


def test_without_a_schedulers_traceback_the_last_error_is_told():
    lines = ["Traceback (most recent call last):", '  File "a.py"', "OSError: no such model", "bye"]
    assert cause_of_death(lines) == "OSError: no such model"


def test_a_wrong_flag_is_told_as_the_parser_tells_it():
    lines = ["usage: launch_server.py [-h]", "launch_server.py: error: unrecognized arguments: --nonsense"]
    assert "unrecognized arguments: --nonsense" in cause_of_death(lines)


def test_otherwise_the_last_lines_are_told():
    assert cause_of_death(["a", "", "b", "c", "d", " "]) == "b | c | d"
    assert cause_of_death([]) == ""


def test_only_what_this_run_wrote_is_read(tmp_path):
    log = tmp_path / "server.log"
    log.write_bytes(b"OldError: then\nnew line\n")
    assert read_tail(log, start=15) == ["new line"]
    assert read_tail(tmp_path / "none") == []


def test_the_import_warning_is_found():
    line = (
        "[2025-01-01 10:00:00] Ignore import error when loading sglang_hs_capture.models.deepseek: No module named 'x'"
    )
    assert import_warning(["a", line]).endswith("deepseek: No module named 'x'")
    assert import_warning(["Ignore import error when loading sglang.srt.models.other: y"]) == ""


def test_a_process_that_was_killed_is_named_and_not_what_broke_in_its_wake():
    lines = [
        "[2026-01-01 00:00:00] Subprocess scheduler_0 (pid=12) crashed with exit code -9. Triggering SIGQUIT",
        "[2026-01-01 00:00:00] Sleeping 5 seconds before crash diagnostics to let GPU activity settle.",
        "BrokenPipeError: [Errno 32] Broken pipe",
    ]
    assert cause_of_death(lines) == "Subprocess scheduler_0 (pid=12) crashed with exit code -9"
