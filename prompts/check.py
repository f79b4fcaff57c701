#!/usr/bin/env python3
"""Check the bundled prompt mix, or with --write list its files anew in mix.toml.

It knows what a good mix is (counts, balance, lengths, order) beyond what a loadable one is, which
moetap.prompts knows. It refuses to know tokenizers: lengths are characters over 3.5.

Exits 1 if there is a fault, and prints each on a line of its own.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import tomllib
from collections import Counter
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT.parent / "harness"))  # works in a checkout that is not installed

from moetap.errors import MoetapError  # noqa: E402
from moetap.prompts import Prompt, mix_sha256, read_mix, read_prompt_file  # noqa: E402

NAME = "moetap-agentic-code"
CLASSES = ("code", "agentic")
AT_LEAST = 24  # prompts of each class
QUICK = 4  # prompts of each class in the quick subset
QUICK_TOKENS = range(60, 901)  # the quick subset has to run on two CPU cores
CHARACTERS_PER_TOKEN = 3.5
BINS = (100, 200, 400, 900, 2000, 3000, 4500)  # upper bounds of the length histogram, in tokens
KEYS = ["id", "class", "tags", "licence", "messages", "tools"]
LICENCE = "Apache-2.0"


def tokens(prompt: Prompt) -> int:
    """Return the estimated length of a prompt, tool schemas included, without a template."""
    size = len(json.dumps(prompt.tools, ensure_ascii=False)) if prompt.tools else 0
    for message in prompt.messages:
        content = message.get("content") or ""
        parts = [content] if isinstance(content, str) else [part["text"] for part in content]
        size += sum(map(len, parts))
        for call in message.get("tool_calls") or []:
            size += len(call["function"]["name"]) + len(call["function"]["arguments"])
    return round(size / CHARACTERS_PER_TOKEN)


def read_folder(root: Path, faults: list[str]) -> dict[str, Prompt]:
    """Return the prompts of all files below `root` by file name, noting those that do not load."""
    prompts = {}
    for path in sorted(root.glob("*/*.json")):
        try:
            prompts[path.relative_to(root).as_posix()] = read_prompt_file(path)
        except MoetapError as error:
            faults.append(str(error))
    return prompts


def check_file(root: Path, file: str, prompt: Prompt) -> list[str]:
    """Return the faults of one prompt that loads."""
    faults = []
    text = (root / file).read_text(encoding="utf-8")
    record = json.loads(text)
    if text != json.dumps(record, indent=2, ensure_ascii=False) + "\n":
        faults.append("not written as indented JSON with one newline at the end")
    if list(record) != [key for key in KEYS if key in record]:
        faults.append(f"its keys are not, in this order, {', '.join(KEYS)} (tools optional)")
    if "tools" in record and not record["tools"]:
        faults.append("'tools' is empty; leave it out")
    if file != f"{prompt.cls}/{prompt.id}.json":
        faults.append("the file is not named CLASS/ID.json")
    if prompt.cls not in CLASSES:
        faults.append(f"class {prompt.cls!r} is not one of {', '.join(CLASSES)}")
    if not re.fullmatch(rf"{re.escape(prompt.cls)}(-[a-z0-9]+)+", prompt.id):
        faults.append("the id is not the class and lower-case words joined by '-'")
    if prompt.licence != LICENCE:
        faults.append(f"licence {prompt.licence!r} is not {LICENCE}")
    if len(set(prompt.tags)) < len(prompt.tags):
        faults.append("a tag is given twice")
    faults += check_conversation(prompt)
    return [f"{root / file}: {fault}" for fault in faults]


def check_conversation(prompt: Prompt) -> list[str]:
    """Return what common chat templates would refuse, or a server of the API would."""
    faults = []
    roles = [message["role"] for message in prompt.messages]
    if "system" in roles[1:]:
        faults.append("a system message is not the first message")
    if roles[roles[0] == "system" :][:1] != ["user"]:
        faults.append("the first message apart from the system's is not from the user")

    offered = {tool["function"]["name"] for tool in prompt.tools}
    waiting: list[Any] = []  # ids of calls not answered yet
    for number, message in enumerate(prompt.messages, start=1):
        if message["role"] == "tool":
            if message.get("tool_call_id") not in waiting:
                faults.append(f"message {number} answers no open tool call")
            else:
                waiting.remove(message["tool_call_id"])
            continue
        if waiting:
            faults.append(f"message {number} comes before the answers to all tool calls")
            waiting = []
        for call in message.get("tool_calls") or []:
            waiting.append(call.get("id"))
            if call.get("type") != "function" or not call.get("id"):
                faults.append(f"message {number} has a tool call without id or type 'function'")
            if call["function"]["name"] not in offered:
                faults.append(f"message {number} calls a tool that is not offered")
    if waiting:
        faults.append("the last tool calls are not all answered")
    for tool in prompt.tools:
        parameters = tool["function"].get("parameters")
        if tool.get("type") != "function" or not isinstance(parameters, dict):
            faults.append(f"tool {tool['function']['name']} lacks type 'function' or parameters")
    return faults


def check_mix(root: Path, prompts: dict[str, Prompt]) -> list[str]:
    """Return the faults of the mix as a whole, and of mix.toml against the folder."""
    faults = []
    counts = Counter(prompt.cls for prompt in prompts.values())
    for cls in CLASSES:
        if counts[cls] < AT_LEAST:
            faults.append(f"{counts[cls]} {cls} prompts, at least {AT_LEAST} are needed")
    if max(counts.values(), default=0) > 1.25 * min(counts[cls] for cls in CLASSES):
        faults.append(f"the classes are out of balance: {dict(counts)}")

    hashes: dict[str, str] = {}
    for file, prompt in prompts.items():
        if prompt.sha256 in hashes:
            faults.append(f"{file} has the same conversation as {hashes[prompt.sha256]}")
        hashes[prompt.sha256] = file

    try:
        quick = read_mix(root, quick=True).prompts
        read_mix(root)
    except MoetapError as error:
        return [*faults, str(error)]
    for cls in CLASSES:
        number = sum(prompt.cls == cls for prompt in quick)
        if number != QUICK:
            faults.append(f"the quick subset has {number} {cls} prompts instead of {QUICK}")
    for prompt in quick:
        if tokens(prompt) not in QUICK_TOKENS:
            faults.append(f"{prompt.id} has about {tokens(prompt)} tokens, unfit for quick")
    index = root / "mix.toml"
    if index.read_text(encoding="utf-8") != render(root, prompts):
        faults.append(f"{index} is not what the folder gives; run check.py --write")
    return faults


def old_settings(root: Path) -> tuple[int, set[str]]:
    """Return the version and the quick files of the present mix.toml, which --write keeps."""
    index = root / "mix.toml"
    if not index.exists():
        return 1, set()
    mix = tomllib.loads(index.read_text(encoding="utf-8"))
    return mix["version"], {row["file"] for row in mix.get("prompts", []) if row.get("quick")}


def in_order(prompts: dict[str, Prompt], quick: set[str]) -> list[str]:
    """Return the files in the order of the mix: classes in turn, the quick subset first.

    So a capture that stops early is balanced, and a quick one is the start of a whole one. Within
    a class the hash of the id decides: it mixes languages and lengths, and a new prompt does not
    reorder the others.
    """

    def place(file: str) -> tuple[bool, str]:
        return file not in quick, hashlib.sha256(prompts[file].id.encode()).hexdigest()

    queues = [
        sorted((file for file, prompt in prompts.items() if prompt.cls == cls), key=place)
        for cls in CLASSES
    ]
    return [file for file in chain(*zip_longest(*queues)) if file is not None]


def render(root: Path, prompts: dict[str, Prompt]) -> str:
    """Return the text of mix.toml for `prompts`."""
    version, quick = old_settings(root)
    digests = {
        file: hashlib.sha256((root / file).read_bytes()).hexdigest()
        for file in in_order(prompts, quick)
    }
    lines = [
        "# Written by prompts/check.py --write, which keeps `version` and the `quick` flags.",
        f'name = "{NAME}"',
        f"version = {version}",
        f'sha256 = "{mix_sha256(list(digests.items()))}"',
    ]
    for file, digest in digests.items():
        prompt = prompts[file]
        lines += ["", "[[prompts]]", f'file = "{file}"', f'id = "{prompt.id}"']
        lines += [f'class = "{prompt.cls}"', f'sha256 = "{digest}"']
        if file in quick:
            lines.append("quick = true")
    return "\n".join(lines) + "\n"


def summary(prompts: dict[str, Prompt]) -> str:
    """Return the counts and the length histogram as text."""
    bounds = (0, *BINS, sys.maxsize)
    labels = [f"{low}-{high - 1}" for low, high in zip(bounds, BINS, strict=False)]
    labels.append(f"{BINS[-1]}+")
    lines = [f"{'tokens':>12}" + "".join(f"{cls:>9}" for cls in CLASSES)]
    for label, low, high in zip(labels, bounds, bounds[1:], strict=False):
        inside = [prompt.cls for prompt in prompts.values() if low <= tokens(prompt) < high]
        lines.append(f"{label:>12}" + "".join(f"{inside.count(cls):>9}" for cls in CLASSES))
    classes = [prompt.cls for prompt in prompts.values()]
    lines.append(f"{'prompts':>12}" + "".join(f"{classes.count(cls):>9}" for cls in CLASSES))
    lines.append(f"about {sum(map(tokens, prompts.values()))} tokens in all")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="regenerate mix.toml first")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder that holds the mix")
    args = parser.parse_args(argv)

    faults: list[str] = []
    prompts = read_folder(args.root, faults)
    if args.write and not faults:
        text = render(args.root, prompts)
        (args.root / "mix.toml").write_text(text, encoding="utf-8", newline="\n")
    for file, prompt in prompts.items():
        faults += check_file(args.root, file, prompt)
    faults += check_mix(args.root, prompts)
    print(summary(prompts))
    for fault in faults:
        print(f"fault: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
