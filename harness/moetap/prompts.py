"""Prompts: the bundled mix and a user's own JSONL file, read into one checked form.

It knows the prompt format (OpenAI chat messages and tools), how to name a fault by file and line,
and how the bundled mix is hashed. It refuses to know tokenizers, chat templates and models: what
a prompt turns into is decided where it is run.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from moetap._data import data_dir
from moetap.errors import MoetapError, UsageError

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Prompt:
    """One conversation that a model is asked to continue.

    Attributes:
        id: unique within its mix.
        cls: `code` or `agentic` in the bundled mix; `user` unless a user's file says otherwise.
        tags: free labels.
        licence: SPDX expression, or empty when a user's file gives none.
        messages: OpenAI chat messages, the last one from the user or a tool.
        tools: OpenAI function schemas; empty when the prompt offers none.
    """

    id: str
    cls: str
    tags: tuple[str, ...]
    licence: str
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]

    @cached_property
    def sha256(self) -> str:
        """Hex SHA-256 of what a model sees: the canonical JSON of messages and tools.

        The id, class, tags and licence are left out, so relabelling a prompt keeps its hash.
        """
        seen = {"messages": self.messages, "tools": self.tools}
        text = json.dumps(seen, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class PromptMix:
    """An ordered set of prompts with a name, a version and a hash.

    Attributes:
        name: the mix's name, or the file name of a user's file.
        version: the mix's version, or empty for a user's file.
        sha256: hex SHA-256 (of the mix's file list, or of a user's file).
        prompts: in the order to run them.
    """

    name: str
    version: str
    sha256: str
    prompts: tuple[Prompt, ...]


def load_mix(quick: bool = False) -> PromptMix:
    """Return the bundled mix, or with `quick` its short subset, every hash verified.

    Raises:
        MoetapError: the mix is missing, unreadable, or differs from its own hashes.
    """
    return read_mix(data_dir("prompts"), quick)


def read_mix(root: Path, quick: bool = False) -> PromptMix:
    """Return the mix that `root/mix.toml` lists, as `load_mix` does for the bundled one.

    The quick subset has a name and a hash of its own, because its results must not be taken for
    those of the whole mix.

    Raises:
        MoetapError: the mix is missing, unreadable, or differs from its own hashes.
    """
    index = root / "mix.toml"
    try:
        mix = tomllib.loads(_read(index).decode())
        name, version, digest = str(mix["name"]), str(mix["version"]), str(mix["sha256"])
        rows = [
            (
                str(row["file"]),
                str(row["sha256"]),
                str(row["id"]),
                str(row["class"]),
                row.get("quick") is True,
            )
            for row in mix["prompts"]
        ]
    except OSError as error:
        raise MoetapError(f"{index}: cannot read: {error.strerror}; reinstall moetap") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MoetapError(f"{index}: malformed prompt mix: {error}; reinstall moetap") from error
    if mix_sha256([(file, sha) for file, sha, *_ in rows]) != digest:
        raise MoetapError(f"{index}: the sha256 of the mix does not match its file list")

    chosen = [row for row in rows if row[4] or not quick]
    prompts = []
    for file, sha, prompt_id, cls, _ in chosen:
        path = root / file
        prompt = read_prompt_file(path, sha)
        if (prompt.id, prompt.cls) != (prompt_id, cls):
            raise MoetapError(f"{path}: id and class differ from those listed in {index}")
        prompts.append(prompt)
    _refuse_duplicates(index, [(None, prompt.id) for prompt in prompts], MoetapError)
    if quick:
        name, digest = f"{name}-quick", mix_sha256([(file, sha) for file, sha, *_ in chosen])
    return PromptMix(name, version, digest, tuple(prompts))


def read_prompt_file(path: Path, sha256: str | None = None) -> Prompt:
    """Return the prompt of one mix file; with `sha256`, only if the file's bytes have that hash.

    Raises:
        MoetapError: the file is missing, differs from `sha256`, or is not a complete prompt.
    """
    try:
        data = _read(path)
    except OSError as error:
        raise MoetapError(f"{path}: cannot read: {error.strerror}; reinstall moetap") from error
    if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
        raise MoetapError(f"{path}: its sha256 is not the one in mix.toml; reinstall moetap")
    try:
        record = _parse(data)
        for key in ("id", "class", "tags", "licence"):
            if not record.get(key):
                _fault(f"'{key}' is missing or empty; every prompt of the mix has one")
        return _prompt(record, default_id="")
    except _Fault as fault:
        raise MoetapError(f"{path}: {fault}") from fault


def mix_sha256(files: list[tuple[str, str]]) -> str:
    """Return the hash of a mix: SHA-256 over `"<file> <sha256>\\n"` lines sorted by file."""
    lines = "".join(f"{file} {sha}\n" for file, sha in sorted(files))
    return hashlib.sha256(lines.encode()).hexdigest()


def load_jsonl(path: str | Path) -> PromptMix:
    """Return the prompts of a user's file: one JSON object a line, of which only `messages` is
    required. Blank lines and a UTF-8 byte order mark are accepted.

    Raises:
        UsageError: the file is missing, empty or not such a file; names the line at fault.
    """
    path = Path(path)
    try:
        data = _read(path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"{path}: cannot read the prompt file: {reason}") from error
    prompts = []
    ids: list[tuple[int | None, str]] = []
    # Split the bytes, not the text: str.splitlines also breaks at U+2028 and others, which JSON
    # strings may hold, and an undecodable byte must not hide the line it is on.
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            prompt = _prompt(_parse(line), default_id=f"line-{number}")
        except _Fault as fault:
            raise UsageError(f"{path}, line {number}: {fault}") from fault
        prompts.append(prompt)
        ids.append((number, prompt.id))
    if not prompts:
        what = "holds only blank lines" if data else "is empty"
        raise UsageError(f"{path}: the prompt file {what}; put one JSON object on each line")
    _refuse_duplicates(path, ids, UsageError)
    return PromptMix(path.name, "", hashlib.sha256(data).hexdigest(), tuple(prompts))


class _Fault(Exception):
    """What is wrong with one record; the caller knows, and adds, where."""


def _fault(what: str) -> NoReturn:
    raise _Fault(what)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except ValueError as error:  # a NUL in the name
        raise OSError(0, str(error)) from error


def _refuse_duplicates(
    path: Path, ids: list[tuple[int | None, str]], kind: type[MoetapError]
) -> None:
    first: dict[str, int | None] = {}
    for number, prompt_id in ids:
        if prompt_id in first:
            if number is None:
                raise kind(f"{path}: id {prompt_id!r} is listed twice")
            raise kind(
                f"{path}, line {number}: id {prompt_id!r} is already used on line "
                f"{first[prompt_id]}; give each prompt its own id"
            )
        first[prompt_id] = number


def _parse(data: bytes) -> dict[str, Any]:
    try:
        record = json.loads(data.decode("utf-8"), parse_constant=_no_constant)
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        _fault(f"byte {error.start + 1} is not UTF-8; save the file as UTF-8")
    except UnicodeEncodeError:
        _fault("an unpaired surrogate escape (\\ud800 to \\udfff) is not text; remove it")
    except json.JSONDecodeError as error:
        # Only a mix's own pretty-printed files reach past the first line of their record.
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        _fault(f"malformed JSON at {line}column {error.colno}: {error.msg}; expected one object")
    except (ValueError, RecursionError) as error:
        _fault(f"malformed JSON: {error}")
    if not isinstance(record, dict):
        _fault(f"expected a JSON object with 'messages', found {_kind(record)}")
    return record


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _prompt(record: dict[str, Any], default_id: str) -> Prompt:
    prompt_id = record.get("id", default_id)
    if not isinstance(prompt_id, str) or not prompt_id.strip() or not prompt_id.isprintable():
        _fault("'id' must be a non-empty string of printable characters")
    cls = record.get("class", "user")
    if not isinstance(cls, str) or not cls.strip() or not cls.isprintable():
        _fault("'class' must be a non-empty string of printable characters")
    tags = record.get("tags", [])
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        _fault("'tags' must be a list of strings")
    licence = record.get("licence", "")
    if not isinstance(licence, str):
        _fault(f"'licence' must be a string, found {_kind(licence)}")

    messages = record.get("messages")
    if messages is None:
        _fault("'messages' is missing; give a list of chat messages")
    if not isinstance(messages, list):
        _fault(f"'messages' must be a list, found {_kind(messages)}")
    if not messages:
        _fault("'messages' is empty; give at least one chat message")
    for number, message in enumerate(messages, start=1):
        _check_message(f"message {number}", message)
    if messages[-1]["role"] not in ("user", "tool"):
        _fault(
            f"the last message is from the {messages[-1]['role']}; "
            "end with a 'user' or 'tool' message for the model to answer"
        )

    tools = record.get("tools")
    if tools is None:  # null means the same as absent, as in the OpenAI API
        tools = []
    if not isinstance(tools, list):
        _fault(f"'tools' must be a list of function schemas, found {_kind(tools)}")
    for number, tool in enumerate(tools, start=1):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not _is_name(function.get("name")):
            _fault(f"tool {number} must be an object with 'function': {{'name': ...}}")
    return Prompt(prompt_id, cls, tuple(tags), licence, tuple(messages), tuple(tools))


def _check_message(where: str, message: Any) -> None:
    if not isinstance(message, dict):
        _fault(f"{where} must be an object, found {_kind(message)}")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        _fault(f"{where} has unknown role {_short(role)}; use one of {', '.join(ROLES)}")
    calls = message.get("tool_calls")
    if calls is not None:
        _check_calls(where, role, calls)

    content = message.get("content")
    if content is None:
        if not calls:
            _fault(f"{where} has no content; only an assistant's with 'tool_calls' may lack it")
    elif isinstance(content, list):
        for part in content:
            is_text = isinstance(part, dict) and part.get("type") == "text"
            if not is_text or not isinstance(part.get("text"), str):
                _fault(f"{where} has a content part that is not {{'type': 'text', 'text': ...}}")
    elif not isinstance(content, str):
        _fault(
            f"{where}'s content must be a string or a list of text parts, found {_kind(content)}"
        )

    for key in ("name", "tool_call_id"):
        if message.get(key) is not None and not isinstance(message[key], str):
            _fault(f"{where}'s '{key}' must be a string, found {_kind(message[key])}")


def _check_calls(where: str, role: str, calls: Any) -> None:
    if not isinstance(calls, list):
        _fault(f"{where}'s 'tool_calls' must be a list, found {_kind(calls)}")
    if calls and role != "assistant":
        _fault(f"{where} is from the {role}; only an assistant's has 'tool_calls'")
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not _is_name(function.get("name")):
            _fault(f"{where} has a tool call without 'function': {{'name': ...}}")
        # Some chat templates walk over the arguments, so text that is no object fails later and
        # far from the line that holds it.
        try:
            arguments = json.loads(function.get("arguments", ""))
        except (TypeError, ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            _fault(f"{where} has a tool call whose 'arguments' is not a string of a JSON object")


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "a boolean"
    kinds = {str: "a string", list: "a list", dict: "an object", int: "a number", float: "a number"}
    return kinds.get(type(value), "null")
