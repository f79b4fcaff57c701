"""The bundled mix holds what it promises, and a faulty prompt file is named by line and cause."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

from moetap import _data
from moetap._data import data_dir
from moetap.errors import MoetapError, UsageError
from moetap.prompts import Prompt, PromptMix, load_jsonl, load_mix, read_mix

USER = {"role": "user", "content": "hi"}
ROOT = data_dir("prompts")


@pytest.fixture(scope="module")
def mix() -> PromptMix:
    return load_mix()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the bundled mix to damage."""
    return Path(shutil.copytree(ROOT, tmp_path / "prompts"))


def record_of(prompt: Prompt) -> dict[str, Any]:
    record: dict[str, Any] = {
        "id": prompt.id,
        "class": prompt.cls,
        "tags": list(prompt.tags),
        "licence": prompt.licence,
        "messages": list(prompt.messages),
    }
    return {**record, "tools": list(prompt.tools)} if prompt.tools else record


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def call(arguments: Any = "{}", name: Any = "f") -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


def fault(path: Path) -> str:
    """The one line that a user sees for the file."""
    with pytest.raises(UsageError) as caught:
        load_jsonl(path)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(str(path))
    return text


# The bundled mix


def test_mix_has_enough_prompts_of_each_class(mix: PromptMix) -> None:
    classes = [prompt.cls for prompt in mix.prompts]
    assert set(classes) == {"code", "agentic"}
    assert classes.count("code") >= 24
    assert classes.count("agentic") >= 24
    assert (mix.name, mix.version) == ("moetap-agentic-code", "1")


def test_mix_prompts_are_complete_and_distinct(mix: PromptMix) -> None:
    assert len({prompt.id for prompt in mix.prompts}) == len(mix.prompts)
    assert len({prompt.sha256 for prompt in mix.prompts}) == len(mix.prompts)
    for prompt in mix.prompts:
        assert prompt.tags, prompt.id
        assert prompt.licence == "Apache-2.0", prompt.id
        assert prompt.messages[-1]["role"] in ("user", "tool"), prompt.id
    assert any(prompt.tools for prompt in mix.prompts if prompt.cls == "agentic")


def test_mix_lists_each_file_of_its_folders() -> None:
    rows = tomllib.loads((ROOT / "mix.toml").read_text(encoding="utf-8"))["prompts"]
    listed = sorted(row["file"] for row in rows)
    assert listed == sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("*/*.json"))


def test_mix_alternates_the_classes(mix: PromptMix) -> None:
    classes = [prompt.cls for prompt in mix.prompts]
    paired = 2 * min(classes.count("code"), classes.count("agentic"))
    for length in range(paired + 1):
        start = classes[:length]
        assert abs(start.count("code") - start.count("agentic")) <= 1


def test_quick_is_the_balanced_start_of_the_mix(mix: PromptMix) -> None:
    quick = load_mix(quick=True)
    assert quick.prompts == mix.prompts[:8]
    assert [prompt.cls for prompt in quick.prompts].count("code") == 4
    assert quick.name == "moetap-agentic-code-quick"
    assert quick.sha256 != mix.sha256


def test_mix_hash_is_the_documented_one(mix: PromptMix) -> None:
    lines = sorted(
        f"{path.relative_to(ROOT).as_posix()} {hashlib.sha256(path.read_bytes()).hexdigest()}\n"
        for path in ROOT.glob("*/*.json")
    )
    assert mix.sha256 == hashlib.sha256("".join(lines).encode()).hexdigest()


def test_lengths_spread_from_short_to_long(mix: PromptMix) -> None:
    sizes = [len(json.dumps(record_of(p))) / 3.5 for p in mix.prompts if p.cls == "code"]
    assert sum(size < 250 for size in sizes) >= len(sizes) / 4
    assert sum(size > 900 for size in sizes) >= len(sizes) / 4
    assert max(sizes) > 3500


def test_mix_round_trips_through_jsonl(mix: PromptMix, tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", *map(record_of, mix.prompts))
    loaded = load_jsonl(path)
    assert loaded.prompts == mix.prompts
    assert [p.sha256 for p in loaded.prompts] == [p.sha256 for p in mix.prompts]
    assert (loaded.name, loaded.version) == ("mine.jsonl", "")
    assert loaded.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_check_script_accepts_the_mix() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "check.py")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "prompts" in done.stdout


def check(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "check.py"), "--root", str(root), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_check_script_finds_a_changed_file_and_write_lists_it_anew(
    copy: Path, mix: PromptMix
) -> None:
    path = copy / "code" / f"{mix.prompts[0].id}.json"
    path.write_text(path.read_text(encoding="utf-8").replace("the", "a", 1), encoding="utf-8")
    done = check(copy)
    assert done.returncode == 1
    assert path.name in done.stderr

    assert check(copy, "--write").returncode == 0
    changed = read_mix(copy)
    assert changed.sha256 != mix.sha256
    assert [p.id for p in changed.prompts] == [p.id for p in mix.prompts]
    assert len(read_mix(copy, quick=True).prompts) == 8
    assert changed.version == mix.version


def drop(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda record: record.pop(key)


def edit(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda record: record.update(values)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (drop("licence"), "'licence' is missing"),
        (drop("tags"), "'tags' is missing"),
        (edit(id="code-other"), "not named CLASS/ID.json"),
        (edit(licence="MIT"), "licence 'MIT' is not Apache-2.0"),
        (edit(note=1), "its keys are not"),
        (edit(tags=["a", "a"]), "a tag is given twice"),
        (edit(messages=[USER, {"role": "system", "content": "x"}, USER]), "a system message"),
        (edit(messages=[USER, {"role": "tool", "content": "x"}]), "answers no open tool call"),
        (
            edit(messages=[USER, {"role": "assistant", "tool_calls": [call()]}, USER]),
            "calls a tool that is not offered",
        ),
    ],
)
def test_check_script_refuses(
    copy: Path, damage: Callable[[dict[str, Any]], None], said: str
) -> None:
    path = next((copy / "code").glob("*.json"))
    record = json.loads(path.read_text(encoding="utf-8"))
    damage(record)
    path.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    done = check(copy)
    assert done.returncode == 1
    assert said in done.stderr


def test_check_script_counts_the_classes(copy: Path) -> None:
    for path in list((copy / "agentic").glob("*.json"))[5:]:
        path.unlink()
    done = check(copy, "--write")
    assert done.returncode == 1
    assert "5 agentic prompts, at least 24" in done.stderr
    assert "out of balance" in done.stderr


def test_a_damaged_mix_is_refused(copy: Path) -> None:
    index = copy / "mix.toml"
    text = index.read_text(encoding="utf-8")
    first = copy / str(tomllib.loads(text)["prompts"][0]["file"])

    first.write_bytes(first.read_bytes() + b" ")
    with pytest.raises(MoetapError, match=f"{first.name}.*sha256"):
        read_mix(copy)
    first.unlink()
    with pytest.raises(MoetapError, match=f"{first.name}: cannot read"):
        read_mix(copy)

    index.write_text(text.replace("sha256 = ", "sha512 = ", 1), encoding="utf-8")
    with pytest.raises(MoetapError, match=r"mix\.toml: malformed"):
        read_mix(copy)
    index.write_text(text.replace('sha256 = "', 'sha256 = "0', 1), encoding="utf-8")
    with pytest.raises(MoetapError, match=r"mix\.toml: the sha256 of the mix"):
        read_mix(copy)
    index.write_text("name = ", encoding="utf-8")
    with pytest.raises(MoetapError, match=r"mix\.toml: malformed"):
        read_mix(copy)
    index.unlink()
    with pytest.raises(MoetapError, match=r"mix\.toml: cannot read"):
        read_mix(copy)


def test_a_mix_that_contradicts_its_files_is_refused(copy: Path) -> None:
    index = copy / "mix.toml"
    text = index.read_text(encoding="utf-8")
    index.write_text(text.replace('class = "code"', 'class = "agentic"', 1), encoding="utf-8")
    with pytest.raises(MoetapError, match="id and class differ"):
        read_mix(copy)


# A prompt's own hash


def test_prompt_hash_is_stable() -> None:
    prompt = Prompt("a", "user", (), "", ({"role": "user", "content": "Größe?"},), ())
    canonical = '{"messages":[{"content":"Größe?","role":"user"}],"tools":[]}'
    assert prompt.sha256 == hashlib.sha256(canonical.encode()).hexdigest()
    assert prompt.sha256 == "f35ff4eb086cb036263eb9d07909caa6d3ee68da37021c06fb8088cadb8370aa"


def test_prompt_hash_covers_what_the_model_sees_and_nothing_else() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    base = Prompt("a", "user", (), "", (USER,), ())
    reordered = Prompt("b", "code", ("x",), "MIT", (dict(reversed(USER.items())),), ())
    assert base.sha256 == reordered.sha256
    assert base.sha256 != Prompt("a", "user", (), "", (USER,), (tool,)).sha256
    assert base.sha256 != Prompt("a", "user", (), "", (USER, USER), ()).sha256


def test_prompts_are_frozen() -> None:
    prompt = Prompt("a", "user", (), "", (USER,), ())
    with pytest.raises(FrozenInstanceError):
        # mypy refuses it too.
        prompt.id = "b"  # type: ignore[misc]


# A user's own file


def test_only_messages_are_required(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    line = json.dumps({"messages": [USER]}).encode()
    path.write_bytes(b"\xef\xbb\xbf" + line + b"\r\n\r\n  \n" + line)  # BOM, CRLF, no last newline
    prompts = load_jsonl(str(path)).prompts
    assert prompts[0] == Prompt("line-1", "user", (), "", (USER,), ())
    assert [prompt.id for prompt in prompts] == ["line-1", "line-4"]


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        [{"role": "user", "content": ""}],
        [{"role": "user", "content": "line\u2028separator \U0001f600"}],
        [USER, {"role": "assistant", "content": None, "tool_calls": [call('{"a": 1}')]},
         {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "done"}],
        [USER, {"role": "assistant", "tool_calls": [call()]},
         {"role": "tool", "tool_call_id": "c1", "content": "done"}],
        [{"role": "user", "content": "a", "tool_calls": [], "name": None}],
    ],
)  # fmt: skip
def test_good_messages_are_kept_as_they_are(tmp_path: Path, messages: list[Any]) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"messages": messages}, ensure_ascii=False), encoding="utf-8")
    assert load_jsonl(path).prompts[0].messages == tuple(messages)


def test_null_tools_are_no_tools(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"messages": [USER], "tools": None})
    assert load_jsonl(path).prompts[0].tools == ()


MESSAGES_FAULTS: list[tuple[Any, str]] = [
    ("hi", "'messages' must be a list, found a string"),
    ([], "'messages' is empty"),
    (["hi"], "message 1 must be an object, found a string"),
    ([{"role": "robot", "content": "x"}], 'unknown role "robot"; use one of system, user'),
    ([{"role": "r" * 99, "content": "x"}], 'unknown role "rrrr'),
    ([{"content": "x"}], "unknown role null"),
    ([{"role": ["user"], "content": "x"}], 'unknown role ["user"]'),
    ([USER, {"role": "user", "content": 5}], "message 2's content must be a string or a list"),
    ([{"role": "user", "content": {"text": "x"}}], "found an object"),
    ([{"role": "user", "content": True}], "found a boolean"),
    ([{"role": "user"}], "message 1 has no content"),
    ([{"role": "user", "content": None}], "message 1 has no content"),
    ([{"role": "assistant", "content": None}, USER], "message 1 has no content"),
    ([{"role": "assistant", "content": None, "tool_calls": []}, USER], "has no content"),
    ([{"role": "user", "content": ["x"]}], "a content part that is not"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], "a content part that is not"),
    ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "a content part that is not"),
    ([{"role": "user", "content": "x", "name": 1}], "'name' must be a string, found a number"),
    ([{"role": "tool", "content": "x", "tool_call_id": 1}], "'tool_call_id' must be a string"),
    ([USER, {"role": "assistant", "content": "x"}], "the last message is from the assistant"),
    ([{"role": "system", "content": "x"}], "the last message is from the system"),
    ([{"role": "user", "content": "x", "tool_calls": [call()]}], "only an assistant's has"),
    ([{"role": "assistant", "tool_calls": "f"}, USER], "'tool_calls' must be a list"),
    ([{"role": "assistant", "tool_calls": ["f"]}, USER], "a tool call without 'function'"),
    ([{"role": "assistant", "tool_calls": [call(name="")]}, USER], "a tool call without"),
    ([{"role": "assistant", "tool_calls": [call({"a": 1})]}, USER], "'arguments' is not a string"),
    ([{"role": "assistant", "tool_calls": [call("{")]}, USER], "'arguments' is not a string"),
    ([{"role": "assistant", "tool_calls": [call("[1]")]}, USER], "'arguments' is not a string"),
]


@pytest.mark.parametrize(("messages", "said"), MESSAGES_FAULTS)
def test_bad_messages_are_named(tmp_path: Path, messages: Any, said: str) -> None:
    path = write(tmp_path / "p.jsonl", {"messages": [USER]}, {"messages": messages})
    text = fault(path)
    assert text.startswith(f"{path}, line 2: ")
    assert said in text
    assert len(text) < len(str(path)) + 200


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ([USER], "expected a JSON object with 'messages', found a list"),
        (None, "found null"),
        (1.5, "found a number"),
        ({}, "'messages' is missing"),
        ({"messages": None}, "'messages' is missing"),
        ({"messages": [USER], "tools": {}}, "'tools' must be a list"),
        ({"messages": [USER], "tools": ["f"]}, "tool 1 must be an object"),
        ({"messages": [USER], "tools": [{"name": "f"}]}, "tool 1 must be an object"),
        ({"messages": [USER], "tools": [{"function": {"name": 1}}]}, "tool 1 must be an object"),
        ({"messages": [USER], "id": 7}, "'id' must be a non-empty string"),
        ({"messages": [USER], "id": " "}, "'id' must be a non-empty string"),
        ({"messages": [USER], "id": "a\nb"}, "'id' must be a non-empty string"),
        ({"messages": [USER], "class": ""}, "'class' must be a non-empty string"),
        ({"messages": [USER], "tags": "x"}, "'tags' must be a list of strings"),
        ({"messages": [USER], "tags": [1]}, "'tags' must be a list of strings"),
        ({"messages": [USER], "licence": None}, "'licence' must be a string, found null"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "unpaired surrogate"),
    ],
)
def test_bad_records_are_named(tmp_path: Path, record: Any, said: str) -> None:
    path = write(tmp_path / "p.jsonl", {"messages": [USER]}, record)
    text = fault(path)
    assert text.startswith(f"{path}, line 2: ")
    assert said in text


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"messages": [', "malformed JSON at column 15"),
        (b"{'messages': []}", "malformed JSON at column 2"),
        (b'{"messages": []} {}', "malformed JSON at column 18"),
        (b'{"messages": [NaN]}', "malformed JSON: NaN"),
        (b'{"messages": ' + b"[" * 200_000, "malformed JSON: "),
        (b'{"messages": [{"role": "user", "content": "caf\xe9"}]}', "byte 47 is not UTF-8"),
    ],
)
def test_unreadable_lines_are_named(tmp_path: Path, line: bytes, said: str) -> None:
    path = tmp_path / "p.jsonl"
    # The third line: a blank one counts too.
    path.write_bytes(json.dumps({"messages": [USER]}).encode() + b"\n\n" + line + b"\n")
    text = fault(path)
    assert text.startswith(f"{path}, line 3: ")
    assert said in text


def test_utf_16_is_refused_on_its_first_line(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"messages": [USER]}), encoding="utf-16")
    assert "line 1: byte 1 is not UTF-8" in fault(path)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is empty"),
        (b"\n \r\n\t\n", "holds only blank lines"),
        (b"\xef\xbb\xbf", "holds only blank lines"),
    ],
)
def test_files_without_prompts_are_refused(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(data)
    assert said in fault(path)


def test_duplicate_ids_are_named_with_both_lines(tmp_path: Path) -> None:
    record = {"id": "a", "messages": [USER]}
    text = fault(write(tmp_path / "p.jsonl", record, {"messages": [USER]}, record))
    assert "line 3: id 'a' is already used on line 1" in text


def test_a_default_id_can_collide_too(tmp_path: Path) -> None:
    first = {"id": "line-2", "messages": [USER]}
    text = fault(write(tmp_path / "p.jsonl", first, {"messages": [USER]}))
    assert "line 2: id 'line-2' is already used on line 1" in text


def test_missing_files_and_folders_are_named(tmp_path: Path) -> None:
    assert "cannot read the prompt file: No such file" in fault(tmp_path / "none.jsonl")
    assert "cannot read the prompt file: " in fault(tmp_path)


# Where the data folders are


def test_data_dir_prefers_the_package_over_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "harness" / "moetap"
    package.mkdir(parents=True)
    monkeypatch.setattr(_data, "_PACKAGE", package)
    with pytest.raises(MoetapError, match="'models' not found"):
        data_dir("models")
    (tmp_path / "models").mkdir()
    assert data_dir("models") == tmp_path / "models"
    (package / "_data" / "models").mkdir(parents=True)
    assert data_dir("models") == package / "_data" / "models"


def test_data_dir_ignores_the_neighbours_of_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site-packages" / "moetap"
    package.mkdir(parents=True)
    (tmp_path / "models").mkdir()
    monkeypatch.setattr(_data, "_PACKAGE", package)
    with pytest.raises(MoetapError, match="'models' not found"):
        data_dir("models")
