"""`mmrouter replay` explains real captures whole, and names the first difference of one that was changed."""

import json
import shutil
import subprocess
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner
from unit.conftest import SHARED, shared_folder

from mmrouter_cli.app import app
from mmrouter_cli.replay import CaptureError, ReplayReport, replay
from mmrouter_lib.engines.sglang.identity import page_hashes

REPOSITORY = Path(__file__).parents[3]
OWN = Path(__file__).parent / "data" / "tiny-qwen2-vl.jsonl"
MODEL = REPOSITORY / "examples" / "models" / "tiny-qwen2-vl"

Rows = list[dict[str, Any]]


@pytest.fixture
def changed(tmp_path: Path) -> Callable[[Callable[[Rows], None]], ReplayReport]:
    """Replay the shipped capture after a change to its rows, with the model."""

    def run(change: Callable[[Rows], None]) -> ReplayReport:
        rows = [json.loads(line) for line in OWN.read_text().splitlines()]
        shutil.copytree(OWN.parent / "images", tmp_path / "images", dirs_exist_ok=True)
        change(rows)
        path = tmp_path / "changed.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)) + "\n")
        return replay(path, model_dir=MODEL)

    return run


def row(rows: Rows, label: str) -> dict[str, Any]:
    return next(row for row in rows if row.get("label") == label)


def edit(row: dict[str, Any], change: Callable[[dict[str, Any]], None], payload: str = "payload") -> None:
    """Change the first store event of a row on the wire."""
    frame = row["frames"][0]
    batch = msgspec.msgpack.decode(bytes.fromhex(frame[payload]))
    change(next(event for event in batch[1] if event["type"] == "BlockStored"))
    frame[payload] = msgspec.msgpack.encode(batch).hex()


def test_a_capture_of_a_real_engine_is_explained_whole_with_and_without_the_model():
    for model in (None, MODEL):
        report = replay(OWN, model_dir=model)
        assert (report.line, report.prompts) == ("blocks=13 matched=13 unexplained=0", 9)
        assert report.rendered == (9 if model else 0)


def _first_part(rows: Rows, label: str) -> dict[str, Any]:
    part: dict[str, Any] = row(rows, label)["request"]["body"]["messages"][0]["content"][0]
    return part


def _one_token_later(event: dict[str, Any]) -> None:
    for entry in event["extra_keys"]:
        for pair in entry or ():
            pair[1] += 1


def _another_token(event: dict[str, Any]) -> None:
    event["token_ids"][7] += 1


CHANGES: dict[str, tuple[Callable[[Rows], None], str]] = {
    "another text": (lambda rows: _first_part(rows, "text").update(text="Another word"), "template: "),
    "parts in another order": (
        lambda rows: row(rows, "two images")["request"]["body"]["messages"][0]["content"].reverse(),
        "template: ",
    ),
    "another salt": (
        lambda rows: row(rows, "cache_salt")["request"]["body"].update(cache_salt="tenant-2"),
        "salt: predicted salt 'tenant-2', the engine used 'tenant-1'",
    ),
    "another LoRA": (lambda rows: row(rows, "text")["request"]["body"].update(model="lora"), "salt: predicted LoRA"),
    "another token on the wire": (lambda rows: edit(row(rows, "text"), _another_token), "template: token 7 (block 0)"),
    "an image somewhere else": (
        lambda rows: edit(row(rows, "a larger image first"), _one_token_later),
        "count: image predicted at token",
    ),
    "a lost batch": (lambda rows: row(rows, "two images")["frames"].clear(), "1 are missing"),
    "a replayed batch that was never sent": (
        lambda rows: rows[-1]["parts"][0].__setitem__(3, rows[-1]["parts"][1][3]),
        "batch 0 is not the one that was sent live",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_capture_is_a_difference_that_is_named(changed, name):
    change, says = CHANGES[name]
    report = changed(change)
    assert report.unexplained > 0
    assert says in report.differences[0], report.differences[0]


def test_a_block_that_was_predicted_and_not_published_is_a_difference(changed):
    def drop_the_last_block(event: dict[str, Any]) -> None:
        event["block_hashes"].pop()
        event["token_ids"] = event["token_ids"][:-32]
        event["extra_keys"].pop()

    report = changed(lambda rows: edit(row(rows, "cache_salt"), drop_the_last_block))
    assert any("predicted, never published" in difference for difference in report.differences)


def test_an_image_whose_bytes_differ_is_another_identity(changed, tmp_path):
    def swap_files(rows: Rows) -> None:
        images = tmp_path / "images"
        (images / "a_112x84.png").write_bytes((images / "b_112x84.png").read_bytes())

    report = changed(swap_files)
    assert report.differences[0].startswith("line 5 (an image by its file): identity: image at token")


def test_a_row_that_cannot_be_rebuilt_says_why_and_its_blocks_are_not_counted(changed):
    report = changed(lambda rows: row(rows, "cache_salt").pop("request"))
    assert report.line == "blocks=11 matched=11 unexplained=0"
    assert report.skipped == ["line 10 (cache_salt): the capture does not hold its request (2 blocks)"]


def test_the_command_exits_0_for_a_whole_match_and_1_for_a_difference(tmp_path):
    command = CliRunner()
    good = command.invoke(app, ["replay", str(OWN), "--model", str(MODEL)])
    assert (good.exit_code, good.output.splitlines()[0]) == (0, "blocks=13 matched=13 unexplained=0")
    shutil.copytree(OWN.parent / "images", tmp_path / "images")
    bad = tmp_path / "bad.jsonl"
    bad.write_text(OWN.read_text().replace("tenant-1", "tenant-2"))
    shown = command.invoke(app, ["replay", str(bad)])
    assert (shown.exit_code, "first difference: line 10 (cache_salt): salt" in shown.output) == (1, True)
    as_json = command.invoke(app, ["replay", str(bad), "--json"])
    assert json.loads(as_json.output)["first_difference"].startswith("line 10 (cache_salt): salt")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("{", "line 1: not JSON"),
        ("[1]", "an object is expected"),
        ('{"kind": "step", "frames": [{"seq": "zz", "payload": ""}]}', "a frame has seq and a payload in hex"),
        ('{"kind": "step", "request": null, "frames": []}', "nothing can be compared"),
        ('{"request": {"body": {"messages": ["x"]}}}', r"line 1 \(step\): a field has an unexpected value"),
        ('{"request": {"body": {"messages": []}}, "reply": 5}', "a field has an unexpected value"),
        ('{"kind": "generate", "features": {"mm_hashes": 1}}', "a field has an unexpected value"),
        ('{"kind": "radix", "page_size": 4, "events": 5}', "a field has an unexpected value"),
    ],
)
def test_a_file_that_is_no_capture_is_refused_with_a_sentence_and_exit_2(tmp_path, text, says):
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(CaptureError, match=says):
        replay(path)
    assert CliRunner().invoke(app, ["replay", str(path)]).exit_code == 2


def test_a_missing_file_and_a_folder_that_is_no_model_are_refused(tmp_path):
    with pytest.raises(CaptureError, match="cannot read"):
        replay(tmp_path / "none.jsonl")
    with pytest.raises(CaptureError, match="--model"):
        replay(OWN, model_dir=tmp_path)


# The first row of a real SGLang capture's shape, and a batch of the event stream as its rows hold them.
SGLANG_ROWS = [
    '{"page_size": 4, "case": "server_info", "reply": null, "frames": []}',
    '{"case": "text", "request": null, "frames": [{"seq": 0, "payload_hex": "93cb000000000000000090c0"}]}',
]
PAGES = (
    '{"kind": "radix", "page_size": 2, "format": "default", "tokens": [1, 2, 3, 4],'
    ' "events": [{"type": "BlockStored", "block_hashes": [%d, %d]}]}'
)


@pytest.mark.parametrize("rows", [SGLANG_ROWS[:1], SGLANG_ROWS[1:]])
def test_a_capture_of_the_other_engine_is_refused_with_exit_2_and_not_called_a_difference(tmp_path, rows):
    theirs = tmp_path / "sglang.jsonl"
    theirs.write_text("\n".join(rows))
    for path, asked, is_of in ((OWN, "sglang", "vllm"), (theirs, "vllm", "sglang")):
        with pytest.raises(CaptureError, match=f"is a capture of {is_of}, not of {asked}$"):
            replay(path, engine=asked)
        assert CliRunner().invoke(app, ["replay", str(path), "--engine", asked]).exit_code == 2
    assert replay(OWN, engine="vllm").unexplained == 0


def test_a_model_is_read_and_not_used_where_a_capture_holds_no_messages(tmp_path):
    path = tmp_path / "sglang.jsonl"
    path.write_text(PAGES % tuple(page_hashes(array("Q", [1, 2, 3, 4]), 2)))
    whole = replay(path, model_dir=MODEL, engine="sglang")
    assert (whole.line, whole.notes[-1][:22]) == ("blocks=2 matched=2 unexplained=0", "--model is not used: t")
    for nothing in (tmp_path / "nope", tmp_path):
        with pytest.raises(CaptureError, match=f"^--model {nothing}: "):
            replay(path, model_dir=nothing)
        assert CliRunner().invoke(app, ["replay", str(path), "--model", str(nothing)]).exit_code == 2


def test_a_vllm_capture_of_which_nothing_is_rendered_says_so(changed):
    def keep_ids_only(rows: Rows) -> None:
        for each in rows:
            if each.get("label") != "text":
                each.pop("request", None)
        row(rows, "text").update(kind="generate", features={"mm_hashes": {}, "mm_placeholders": {}})
        ids = row(rows, "text")["reply"]["prompt_token_ids"]
        rows.insert(1, {"kind": "render", "reply": {"token_ids": ids}})

    report = changed(keep_ids_only)
    assert (report.unexplained, report.rendered) == (0, 0)
    assert report.notes[-1].startswith("--model is not used: ")


@pytest.fixture(scope="session")
def built_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the model that captures of a tiny engine were made with."""
    script = SHARED / "tools" / "vllm" / "build_tiny.py"
    if not script.is_file():
        pytest.skip(f"not run: no {script}")
    made = tmp_path_factory.mktemp("tiny")
    subprocess.run([sys.executable, str(script), str(made), "qwen2vl"], check=True, capture_output=True)
    return made / "qwen2vl"


LLAVA, LLAVA_NEXT = "llava-hf--llava-1.5-7b-hf", "llava-hf--llava-v1.6-mistral-7b-hf"
PHI = "microsoft--Phi-3-vision-128k-instruct"
# capture -> blocks, prompts rendered by the library (0: taken from the answers), blocks of rows that cannot be rebuilt,
# the model that renders ("" for the tiny one)
VLLM = {
    "qwen2vl_core_uuid_clear": (87, 31, 0, ""),
    "qwen2vl_evict_byteshash": (30, 6, 0, ""),
    "qwen2vl_kwargs_byteshash": (16, 8, 0, ""),
    "qwen2vl_kvshare_lora": (16, 5, 0, ""),
    "qwen2vl_prompt_embeds": (3, 1, 2, ""),
    "qwen2vl_render_generate": (6, 0, 0, ""),
    "qwen2vl-real": (23, 0, 0, ""),
    "qwen3vl-real": (20, 0, 0, ""),
    "llava15-real": (128, 8, 0, LLAVA),
    "llavanext-real": (279, 8, 0, LLAVA_NEXT),
    "phi3v-nosw": (320, 8, 0, PHI),
    # The picture of one row is not there, and one answer is the engine's end.
    "phi3v-real_sw131072_edge": (155, 4, 60, PHI),
    "phi3v-real_sw131072_probes": (85, 9, 0, PHI),  # events that name fewer blocks than they have tokens
}


@pytest.mark.parametrize("name", VLLM)
def test_every_block_of_the_recorded_engines_is_explained(shared_capture, request, name):
    blocks, rendered, left_out, real = VLLM[name]
    model = shared_folder("MMROUTER_MODELS", f"models/{real}") if real else None
    if rendered and not real:
        model = request.getfixturevalue("built_model")
    report = replay(shared_capture(f"vllm/{name}"), model_dir=model)
    assert report.line == f"blocks={blocks} matched={blocks} unexplained=0", report.differences[:3]
    assert report.rendered == rendered
    assert sum(int(reason.rpartition("(")[2].split()[0]) for reason in report.skipped) == left_out


@pytest.mark.parametrize("name", ["qwen2vl_encoder_disagg", "qwen2vl_pd_nixl"])
def test_a_capture_without_requests_is_not_passed_off_as_a_match(shared_capture, name):
    with pytest.raises(CaptureError, match=r"nothing can be compared.*does not hold its request"):
        replay(shared_capture(f"vllm/{name}"))


@pytest.fixture(scope="session")
def shared_capture() -> Callable[[str], Path]:
    """Path of a capture of ../shared by ``engine/name``."""

    def find(name: str) -> Path:
        path = shared_folder("MMROUTER_CAPTURES", "captures") / f"{name}.jsonl"
        if not path.is_file():
            pytest.skip(f"not run: no capture at {path} (MMROUTER_CAPTURES)")
        return path

    return find


SGLANG = {"qwen2_vl.page1": (5933, 10), "qwen3_vl.page4": (1459, 7), "offline": (164, 12)}


@pytest.mark.parametrize("name", SGLANG)
def test_every_page_of_the_recorded_sglang_engines_is_explained(shared_capture, name):
    blocks, compared = SGLANG[name]
    report = replay(shared_capture(f"sglang/{name}"))
    assert report.line == f"blocks={blocks} matched={blocks} unexplained=0", report.differences[:3]
    assert (report.engine, report.prompts) == ("sglang", compared)


@pytest.mark.parametrize(
    ("case", "change", "says"),
    [
        ("text_ids", lambda r: r["request"].update(input_ids="101..122"), "template: the published ids"),
        ("chat_A_B", lambda r: r["request"].update(images=["B", "A"]), "identity: image B has the sentinels"),
        ("chat_A_B", lambda r: r["request"].update(images=["A"]), "count: 1 images requested, 2 published"),
        (
            "gen_A_mm_hash16",
            lambda r: r["request"].update(mm_hashes=["00112233445566fe"]),
            "identity: image data a07b455a6b41",
        ),
        ("chat_B", lambda r: r["frames"].pop(0), "1 are missing"),
        ("chat_A", lambda r: edit(r, _another_token, "payload_hex"), "its ids make"),
    ],
)
def test_a_changed_sglang_capture_is_a_difference_that_is_named(shared_capture, tmp_path, case, change, says):
    rows = [json.loads(line) for line in shared_capture("sglang/qwen2_vl.page1").read_text().splitlines()]
    change(next(row for row in rows if row["case"] == case))
    path = tmp_path / "changed.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    report = replay(path)
    assert report.unexplained > 0
    assert says in report.differences[0]
