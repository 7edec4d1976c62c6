"""The check of a consumer that is a process of its own, in any language."""

import json
import subprocess
import sys

from artefacts import ROOT

CHECK = [sys.executable, str(ROOT / "tests" / "kv_events" / "check.py"), "--only", "0.32.0-mla"]
NOTHING = """
import json, sys
for line in sys.stdin:
    if "request" in json.loads(line):
        print(json.dumps({"hit": %s}), flush=True)
"""


def check(program: str, *options: str) -> "subprocess.CompletedProcess[str]":
    command = [*CHECK, *options, "--", sys.executable, "-S", "-c", program]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_consumer_that_promises_nothing_passes_with_its_figures() -> None:
    done = check(NOTHING % "0", "--json")
    (result,) = json.loads(done.stdout)
    assert (done.returncode, result["above"], result["answered_tokens"]) == (0, 0, 0)
    assert result["below"] > 0 < result["equal"]


def test_a_consumer_that_promises_too_much_fails() -> None:
    done = check(NOTHING % 'len(json.loads(line)["request"]["tokens"])')
    assert done.returncode == 1
    assert "| vllm 0.32.0 | MLA |" in done.stdout


def test_a_consumer_that_ends_or_answers_something_else_is_named() -> None:
    assert (
        "the consumer ended with status 3" in (ended := check("import sys; sys.stdin.readline(); sys.exit(3)")).stderr
    )
    assert 'not {"hit": TOKENS}' in (other := check("print('hello', flush=True); import sys; sys.stdin.read()")).stderr
    assert (ended.returncode, other.returncode) == (2, 2)


def test_a_text_in_no_recordings_name_is_an_error() -> None:
    done = check(NOTHING % "0", "--only", "none has this")
    assert (done.returncode, done.stdout) == (2, "")
    assert "has 'none has this' in its name" in done.stderr
