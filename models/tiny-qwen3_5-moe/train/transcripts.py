"""Chat and tool-calling transcripts, cut and templated from real source files.

Knows how to turn corpus documents into conversations: single requests about a function (write,
complete, fix, explain, refactor, test), and agent runs with tool schemas, calls, results, errors
and recovery. Everything is drawn from one seeded generator, so a seed gives the same transcripts.
Every conversation is rendered through the model's own chat template.
"""

from __future__ import annotations

import ast
import json
import random
import re
import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phrases import (
    ASKS,
    CLOSERS,
    COMMANDS,
    DOMAINS,
    MUTATIONS,
    NAMES,
    PROJECTS,
    QUESTIONS,
    RECORDS,
    SYSTEMS,
    THANKS,
    THOUGHTS,
    TOOL_FAMILIES,
    UTILITIES,
)
from transformers.utils.chat_template_utils import render_jinja_template

Message = dict[str, Any]


@dataclass(frozen=True)
class Document:
    """One source file of the corpus."""

    package: str
    path: str
    language: str
    text: str

    def as_dict(self) -> dict[str, str]:
        """Return the fields as a JSON-ready dictionary."""
        return asdict(self)


@dataclass(frozen=True)
class Function:
    """A function or method, with where it stands in its file (``first``: its line, from 0)."""

    name: str
    owner: str
    source: str
    doc: str
    args: tuple[str, ...]
    first: int
    document: Document

    @property
    def signature(self) -> str:
        """The def line(s), up to the colon that opens the body."""
        lines = self.source.split("\n")
        for i, line in enumerate(lines):
            if line.rstrip().endswith(":"):
                return "\n".join(lines[: i + 1])
        return lines[0]

    @property
    def without_doc(self) -> str:
        """The source with the docstring cut out."""
        node = ast.parse(self.source).body[0]
        head = node.body[0]  # type: ignore[attr-defined]
        lines = self.source.split("\n")
        return "\n".join(lines[: head.lineno - 1] + lines[head.end_lineno :])


def functions_of(document: Document) -> list[Function]:
    """List the functions of 4 to 70 lines in a Python file."""
    try:
        tree = ast.parse(document.text)
    except (SyntaxError, ValueError, RecursionError):
        return []
    lines = document.text.split("\n")
    found = []
    owners: list[tuple[str, ast.AST]] = [("", tree)]
    owners += [(node.name, node) for node in tree.body if isinstance(node, ast.ClassDef)]
    for owner, parent in owners:
        for node in parent.body:  # type: ignore[attr-defined]
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if not 4 <= (node.end_lineno or 0) - node.lineno + 1 <= 70:
                continue
            source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            try:
                ast.parse(source)
            except SyntaxError:
                continue
            doc = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ").strip()
            args = tuple(a.arg for a in node.args.args if a.arg not in ("self", "cls"))
            found.append(
                Function(node.name, owner, source, doc[:300], args, node.lineno - 1, document)
            )
    return found


class TranscriptWriter:
    """Writes rendered transcripts about a set of documents.

    ``write()`` returns one conversation as text; kinds are drawn by weight.
    """

    def __init__(self, documents: list[Document], template: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.template = template.read_text()
        self.others = [d for d in documents if d.language != "python"]
        self.functions: list[Function] = []
        self.by_file: list[list[Function]] = []
        for document in documents:
            if document.language == "python" and (found := functions_of(document)):
                self.functions += found
                self.by_file.append(found)
        self.documented = [f for f in self.functions if len(f.doc) > 15]
        self.kinds: list[tuple[float, Callable[[], tuple[list[Message], list[Any] | None]]]] = [
            (16, self.chat),
            (4, self.snippet_chat),
            (8, self.utility_chat),
            (13, self.fix_agent),
            (9, self.search_agent),
            (5, self.write_agent),
            (8, self.data_agent),
        ]

    # --- small helpers ---

    def one(self, options: Any) -> Any:
        """Pick one of a sequence."""
        return options[self.rng.randrange(len(options))]

    def chance(self, probability: float) -> bool:
        """Return True with the given probability."""
        return self.rng.random() < probability

    def fill(self, pattern: str, **values: Any) -> str:
        """Fill a phrase's {slots}; names, projects and domains are drawn where not given."""
        defaults = {
            "person": self.one(NAMES),
            "project": self.one(PROJECTS),
            "domain": self.one(DOMAINS),
            "n": self.rng.randint(2, 40),
        }
        return pattern.format_map(defaults | values)

    def write(self) -> str:
        """Return one conversation, rendered by the chat template."""
        weights, kinds = zip(*self.kinds, strict=True)
        messages, tools = self.rng.choices(kinds, weights)[0]()
        if self.chance(0.5):
            self.add_thoughts(messages)
        rendered, _ = render_jinja_template(
            [messages], tools=tools, chat_template=self.template, add_generation_prompt=False
        )
        return rendered[0].rstrip("\n")

    def add_thoughts(self, messages: list[Message]) -> None:
        """Give assistant turns a short thought, from the notes that the scenario left."""
        for message in messages:
            if message["role"] != "assistant":
                continue
            note = message.pop("note", "")
            thought = self.fill(self.one(THOUGHTS), note=note).strip()
            if self.chance(0.4):
                thought += "\n" + self.fill(self.one(THOUGHTS), note="").strip()
            message["reasoning_content"] = thought

    def say(self, text: str, note: str = "", call: tuple[str, dict[str, Any]] | None = None) -> Any:
        """Build an assistant message, with one tool call if given."""
        message: Message = {"role": "assistant", "content": text, "note": note}
        if call is not None:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call[0], "arguments": call[1]}}
            ]
        return message

    def system(self, tools: bool = False) -> list[Message]:
        """Return zero or one system message."""
        if not tools and self.chance(0.5):
            return []
        text = " ".join(
            self.fill(phrase) for phrase in self.rng.sample(SYSTEMS, self.rng.randint(1, 4))
        )
        return [{"role": "system", "content": text}]

    def fence(self, code: str, language: str = "python") -> str:
        """Wrap code in a Markdown fence."""
        return f"```{language}\n{code.rstrip()}\n```"

    def facts(self, source: str) -> list[str]:
        """Say what a function visibly does: loops, calls, raises, returns."""
        tree = ast.parse(source)
        facts = []
        calls: list[str] = []
        for node in ast.walk(tree):
            if isinstance(node, ast.For):
                facts.append(f"loops over `{ast.unparse(node.iter)[:60]}`")
            elif isinstance(node, ast.If):
                facts.append(f"checks whether `{ast.unparse(node.test)[:70]}`")
            elif isinstance(node, ast.Raise) and node.exc is not None:
                facts.append(f"raises `{ast.unparse(node.exc)[:70]}`")
            elif isinstance(node, ast.Return) and node.value is not None:
                facts.append(f"returns `{ast.unparse(node.value)[:70]}`")
            elif isinstance(node, ast.With | ast.AsyncWith):
                facts.append(f"opens `{ast.unparse(node.items[0])[:60]}` as a context")
            elif isinstance(node, ast.Try):
                facts.append("guards the risky part with try/except")
            elif isinstance(node, ast.Call):
                calls.append(ast.unparse(node.func)[:40])
        unique = list(dict.fromkeys(calls))[:4]
        if unique:
            facts.append("calls " + ", ".join(f"`{name}`" for name in unique))
        return list(dict.fromkeys(facts))[:6]

    def explanation(self, function: Function) -> str:
        """Explain a function in prose or as a list."""
        facts = self.facts(function.source)
        lead = function.doc or self.fill(
            self.one(["`{f}` is a helper.", "Here is what `{f}` does.", "In short:"]),
            f=function.name,
        )
        if self.chance(0.5):
            return f"{lead}\n\n" + "\n".join(f"- It {fact}." for fact in facts)
        if self.chance(0.4):
            steps = "\n".join(f"{i}. It {fact}." for i, fact in enumerate(facts, 1))
            return f"`{function.name}({', '.join(function.args)})`: {lead}\n\n{steps}"
        return f"{lead} It " + ", then ".join(facts) + "."

    def mutate(self, source: str) -> tuple[str, str, str, str] | None:
        """Plant one bug; return (buggy source, good line, bad line, what is wrong)."""
        lines = source.split("\n")
        order = list(range(1, len(lines)))
        self.rng.shuffle(order)
        for i in order:
            if lines[i].strip().startswith(("#", '"', "'")):
                continue
            for pattern, replacement, reason in self.rng.sample(MUTATIONS, len(MUTATIONS)):
                bad, hits = re.subn(pattern, replacement, lines[i], count=1)
                if hits and bad != lines[i]:
                    buggy = "\n".join([*lines[:i], bad, *lines[i + 1 :]])
                    return buggy, lines[i], bad, reason
        return None

    def test_for(self, function: Function) -> str:
        """Write a pytest test around a call of the function."""
        module = function.document.path.removesuffix(".py").replace("/", ".")
        values = [self.one(["1", "None", '"a"', "[]", "{}", "0", "[1, 2, 3]", '"x/y"', "True"])
                  for _ in function.args]  # fmt: skip
        target = function.owner or function.name
        call = f"{function.name}({', '.join(values)})"
        make = f"    subject = {function.owner}()\n" if function.owner else ""
        call = f"subject.{call}" if function.owner else call
        name = function.name.strip("_")
        check = self.one(
            [
                f"    result = {call}\n    assert result is not None",
                f"    assert {call} == {self.one(values or ['None'])}",
                f"    with pytest.raises({self.one(['ValueError', 'TypeError', 'KeyError'])}):\n"
                f"        {call}",
                f"    first = {call}\n    second = {call}\n    assert first == second",
            ]
        )
        extra = ""
        if function.args and self.chance(0.4):
            arg = function.args[0]
            extra = (
                f'\n\n\n@pytest.mark.parametrize("{arg}", [{", ".join(dict.fromkeys(values))}])\n'
                f"def test_{name}_accepts({arg}):\n{make}"
                f"    assert {call.split('(')[0]}({arg}) is not None"
            )
        return (
            f"import pytest\n\nfrom {module} import {target}\n\n\n"
            f"def test_{name}_{self.one(['basic', 'returns', 'edge_case', 'works', 'empty'])}():\n"
            f"{make}{check}{extra}\n"
        )

    # --- conversations without tools ---

    def chat(self) -> tuple[list[Message], None]:
        """One to three requests about functions of one file."""
        messages = self.system()
        group = self.one(self.by_file)
        for _ in range(self.rng.choice([1, 1, 1, 2, 3])):
            function = self.one(group)
            if self.chance(0.4) and self.documented:
                function = self.one(self.documented)
            messages += self.request(function)
        if self.chance(0.15):
            messages += [
                {"role": "user", "content": self.fill(self.one(THANKS))},
                self.say(self.fill(self.one(CLOSERS))),
            ]
        return messages, None

    def request(self, function: Function) -> list[Message]:
        """One request about a function and its answer."""
        kind = self.one(["write", "complete", "fix", "explain", "refactor", "test", "file"])
        doc = function.doc or f"Handle {', '.join(function.args) or 'the call'}."
        ask = self.fill(
            self.one(ASKS[kind]),
            f=function.name,
            args=", ".join(f"`{a}`" for a in function.args) or "no arguments",
            doc=doc[0].lower() + doc[1:].rstrip("."),
            module=function.document.path,
        )
        after = "\n\n" + self.explanation(function) if self.chance(0.4) else ""
        lead = self.fill(self.one(CLOSERS)) + "\n\n" if self.chance(0.3) else ""
        if kind == "write":
            return self.turn(ask, lead + self.fence(function.source) + after, function.doc)
        if kind == "complete":
            lines = function.source.split("\n")
            cut = self.rng.randint(1, max(1, len(lines) * 2 // 3))
            part, rest = "\n".join(lines[:cut]), "\n".join(lines[cut:])
            answer = rest if self.chance(0.3) else function.source
            return self.turn(f"{ask}\n\n{self.fence(part)}", self.fence(answer), function.doc)
        if kind == "fix" and (planted := self.mutate(function.source)):
            buggy, good, bad, reason = planted
            detail = f"`{bad.strip()}` should be `{good.strip()}`: {reason}."
            answer = f"{lead}{detail}\n\n{self.fence(function.source)}"
            if self.chance(0.3):
                answer = f"{self.fence(function.source)}\n\nThe bug: {detail}"
            return self.turn(f"{ask}\n\n{self.fence(buggy)}", answer, detail)
        if kind == "test":
            answer = lead + self.fence(self.test_for(function))
            return self.turn(f"{ask}\n\n{self.fence(function.source)}", answer, function.doc)
        if kind == "file":
            text = function.document.text.split("\n")
            start = max(0, function.first - self.rng.randint(10, 120))
            shown = "\n".join(text[start : function.first])
            return self.turn(
                f"{ask}\n\n{self.fence(shown)}", self.fence(function.source) + after, function.doc
            )
        if kind == "refactor" and function.doc:
            return self.turn(
                f"{ask}\n\n{self.fence(function.without_doc)}",
                lead + self.fence(function.source) + after,
                function.doc,
            )
        ask = self.fill(self.one(ASKS["explain"]), f=function.name)
        return self.turn(
            f"{ask}\n\n{self.fence(function.source)}", self.explanation(function), function.doc
        )

    def turn(self, ask: str, answer: str, note: str) -> list[Message]:
        """A user message and its answer."""
        return [{"role": "user", "content": ask}, self.say(answer.strip(), note)]

    def snippet_chat(self) -> tuple[list[Message], None]:
        """A request about a file in another language."""
        if not self.others:
            return self.chat()
        document = self.one(self.others)
        lines = document.text.split("\n")
        start = self.rng.randrange(max(1, len(lines) - 20))
        size = self.rng.randint(8, 45)
        head, tail = lines[start : start + size // 2], lines[start + size // 2 : start + size]
        name = document.path.rsplit("/", 1)[-1]
        if self.chance(0.6):
            ask = f"Continue this {document.language} file (`{name}`)."
            shown, answer = "\n".join(head), "\n".join(tail)
        else:
            ask = (
                f"Show me the part of `{document.path}` that starts with `{head[0].strip()[:60]}`."
            )
            shown, answer = "", "\n".join(head + tail)
        block = f"\n\n{self.fence(shown, document.language)}" if shown else ""
        return [
            *self.system(),
            *self.turn(ask + block, self.fence(answer, document.language), f"It is {name}"),
        ], None

    def utility_chat(self) -> tuple[list[Message], None]:
        """A short everyday request: SQL, shell, JSON, regex, commit messages, general questions."""
        record = self.one(RECORDS)
        table, columns = record["table"], list(record["columns"])
        a, b, c = self.rng.sample(columns, 3)
        values = {
            "table": table, "a": a, "b": b, "c": c, "columns": ", ".join(columns),
            "value": self.one(NAMES).lower(), "limit": self.rng.choice([3, 5, 10, 20, 50, 100]),
            "Row": table.title().replace("_", "").rstrip("s"),
        }  # fmt: skip
        messages = self.system()
        for _ in range(self.rng.choice([1, 1, 2, 3])):
            ask, answer = self.one(UTILITIES if self.chance(0.6) else QUESTIONS)
            messages += self.turn(
                self.fill(ask, **values), self.fill(answer, **values), self.fill(ask, **values)
            )
        return messages, None

    # --- conversations with tools ---

    def toolbox(self, needed: list[str]) -> tuple[list[Any], dict[str, Callable[..., Any]]]:
        """Draw tool schemas: one naming for each needed ability, and a few others beside them.

        Returns the schemas and, for each ability, a builder of its (name, arguments) pair.
        """
        schemas, builders = [], {}
        extra = self.rng.sample(sorted(TOOL_FAMILIES), self.rng.randint(0, 4))
        for ability in dict.fromkeys([*needed, *extra]):
            family = TOOL_FAMILIES[ability]
            name = self.one(family["names"])
            slots = [self.one(options) for options in family["slots"]]
            properties = {
                slot: {"type": kind, "description": self.one(texts)}
                for slot, kind, texts in zip(slots, family["types"], family["texts"], strict=True)
            }
            schemas.append(
                {
                    "type": "function",
                    "function": {
                        "name": name,
                        "description": self.one(family["about"]),
                        "parameters": {
                            "type": "object",
                            "properties": properties,
                            "required": slots[: family["required"]],
                        },
                    },
                }
            )

            def build(*values: Any, name: str = name, slots: list[str] = slots) -> Any:
                return name, dict(zip(slots, values, strict=False))

            builders[ability] = build
        self.rng.shuffle(schemas)
        return schemas, builders

    def numbered(self, lines: list[str], first: int, style: int) -> str:
        """Show file lines as tools do: bare, ``cat -n`` or ``12: code``."""
        if style == 0:
            return "\n".join(lines)
        mark = "\t" if style == 1 else ": "
        return "\n".join(f"{first + i + 1:>{6 if style == 1 else 1}}{mark}{line}"
                         for i, line in enumerate(lines))  # fmt: skip

    def grep(self, word: str, document: Document, path: str) -> str:
        """Return the file's lines that hold a word, in ripgrep's format."""
        hits = [
            f"{path}:{i}:{line}"
            for i, line in enumerate(document.text.split("\n"), 1)
            if word in line
        ]
        return "\n".join(hits[:12]) or "(no matches)"

    def listing(self, function: Function) -> str:
        """Return a directory listing around a function's file."""
        folder = function.document.path.rsplit("/", 1)[0]
        near = [g[0].document.path for g in self.by_file if g[0].document.path.startswith(folder)]
        near += [self.one(self.by_file)[0].document.path.rsplit("/", 1)[-1] for _ in range(5)]
        return "\n".join(sorted({function.document.path, *near})[: self.rng.randint(4, 16)])

    def pytest_output(self, function: Function, bad: str, reason: str, failed: int) -> str:
        """Return what pytest prints for one failing or no failing test."""
        total = self.rng.randint(max(1, failed), 24)
        name = f"test_{function.name.strip('_')}"
        file = f"tests/test_{function.document.path.rsplit('/', 1)[-1]}"
        seconds = f"{self.rng.uniform(0.03, 4):.2f}s"
        if not failed:
            if self.chance(0.5):
                return f"{'.' * total:<72}[100%]\n{total} passed in {seconds}"
            head = f"collected {total} items\n\n{file} {'.' * total} [100%]\n\n"
            long, short = "=" * 20, "=" * 5
            tail = f"{short} {total} passed in {seconds} {short}"
            return f"{long} test session starts {long}\n{head}{tail}"
        line = function.first + self.rng.randint(1, 20)
        error = self.one(["AssertionError", "TypeError", "ValueError", "KeyError", "IndexError"])
        body = (
            f"{'_' * 20} {name} {'_' * 20}\n\n    def {name}():\n>       "
            f"{self.one(['assert result == expected', 'check(subject)', 'assert not errors'])}\n"
            f"E       {error}: {reason}\n\n{function.document.path}:{line}: {error}\n"
            f"    {bad.strip()}\n"
        )
        return (
            f"{'.' * (total - failed)}F\n{'=' * 20} FAILURES {'=' * 20}\n{body}"
            f"{'=' * 10} short test summary info {'=' * 10}\nFAILED {file}::{name} - {error}\n"
            f"{failed} failed, {total - failed} passed in {seconds}"
        )

    def result(self, content: Any) -> Message:
        """Build a tool message."""
        return {"role": "tool", "content": content}

    def stumble(self, tools: dict[str, Callable[..., Any]], path: str) -> list[Message]:
        """A first call that fails, and what the assistant says before it recovers."""
        wrong = path.replace("/", "/src/", 1) if self.chance(0.5) else f"src/{path}"
        error = self.one(
            [
                f"Error: file not found: {wrong}",
                f"cat: {wrong}: No such file or directory",
                f'{{"error": "ENOENT", "path": "{wrong}"}}',
                f"FileNotFoundError: [Errno 2] No such file or directory: '{wrong}'",
            ]
        )
        return [
            self.say("", "Open the file first", tools["read"](wrong)),
            self.result(error),
        ]

    def read_call(self, tools: Any, function: Function, path: str, text: str) -> list[Message]:
        """Read the part of a file around a function."""
        lines = text.split("\n")
        size = self.rng.choice([40, 60, 90, 140, 220])
        start = max(0, min(function.first - self.rng.randint(0, 30), len(lines) - size))
        shown = self.numbered(lines[start : start + size], start, self.rng.randrange(3))
        call = tools["read"](path, start + 1, size)
        if start == 0 and self.chance(0.5):
            call = tools["read"](path)
        text = self.fill(self.one(COMMANDS["read"]), path=path, f=function.name)
        return [self.say(text if self.chance(0.5) else "", f"Look at {path}", call),
                self.result(shown)]  # fmt: skip

    def fix_agent(self) -> tuple[list[Message], list[Any]]:
        """Find a planted bug from a failing test, edit, test again, report."""
        function = self.one(self.functions)
        planted = self.mutate(function.source)
        if planted is None:
            return self.search_agent()
        _, good, bad, reason = planted
        indent = 0 if not function.owner else 4
        good, bad = " " * indent + good, " " * indent + bad
        path = function.document.path
        lines = function.document.text.split("\n")
        for i in range(function.first, min(len(lines), function.first + 70)):
            if lines[i].rstrip() == good.rstrip():
                lines[i] = bad
                break
        schemas, tools = self.toolbox(["read", "grep", "edit", "run"])
        flags = self.one(["-q", "-x", "-q -x", "--tb=short"])
        test = f"pytest {flags} tests/test_{path.rsplit('/', 1)[-1]}"
        messages = self.system(tools=True)
        failure = self.pytest_output(function, bad, reason, 1)
        ask = self.fill(self.one(COMMANDS["fix"]), f=function.name, path=path, test=test)
        if self.chance(0.3):
            ask += "\n\n" + failure
        messages.append({"role": "user", "content": ask})
        if self.chance(0.3):
            plan = self.rng.sample(COMMANDS["plan"], 3)
            text = "\n".join(f"{i}. {self.fill(p, f=function.name, path=path)}"
                             for i, p in enumerate(plan, 1))  # fmt: skip
            messages.append(self.say("Plan:\n" + text, "Make a plan", tools["run"](test)))
        else:
            messages.append(self.say("", "Reproduce it", tools["run"](test)))
        messages.append(self.result(failure))
        if self.chance(0.25):
            messages += self.stumble(tools, path)
        if self.chance(0.6):
            call = tools["grep"](f"def {function.name}", path if self.chance(0.5) else ".")
            messages += [
                self.say("", f"Where is {function.name} defined?", call),
                self.result(self.grep(function.name, function.document, path)),
            ]
        messages += self.read_call(tools, function, path, "\n".join(lines))
        if self.chance(0.2):
            wrong = bad.strip() + "  "
            messages += [
                self.say("", f"The line {bad.strip()} is wrong", tools["edit"](path, wrong, good)),
                self.result(self.one(COMMANDS["edit_failed"])),
            ]
        text = self.fill(self.one(COMMANDS["found"]), bad=bad.strip(), good=good.strip(),
                         reason=reason, path=path)  # fmt: skip
        messages += [
            self.say(text, reason, tools["edit"](path, bad, good)),
            self.result(self.fill(self.one(COMMANDS["edited"]), path=path)),
            self.say("", "Run the tests again", tools["run"](test)),
            self.result(self.pytest_output(function, bad, reason, 0)),
            self.say(
                self.fill(self.one(COMMANDS["done"]), bad=bad.strip(), good=good.strip(),
                          reason=reason, path=path, f=function.name),
                "All tests pass",
            ),
        ]  # fmt: skip
        return messages, schemas

    def search_agent(self) -> tuple[list[Message], list[Any]]:
        """Answer a question about a code base by listing, searching and reading."""
        function = self.one(self.documented or self.functions)
        path = function.document.path
        schemas, tools = self.toolbox(["read", "grep", "list"])
        ask = self.fill(self.one(COMMANDS["where"]), f=function.name, path=path,
                        folder=path.rsplit("/", 1)[0],
                        doc=(function.doc or function.name).rstrip(".").lower())  # fmt: skip
        messages = [*self.system(tools=True), {"role": "user", "content": ask}]
        if self.chance(0.5):
            messages += [
                self.say("", "See what is there", tools["list"](path.rsplit("/", 1)[0])),
                self.result(self.listing(function)),
            ]
        if self.chance(0.2):
            messages += self.stumble(tools, path)
        call = tools["grep"](function.name, ".")
        messages += [self.say("", f"Search for {function.name}", call),
                     self.result(self.grep(function.name, function.document, path))]  # fmt: skip
        messages += self.read_call(tools, function, path, function.document.text)
        for other in self.rng.sample(self.by_file, min(len(self.by_file), self.rng.choice([0, 1]))):
            messages += self.read_call(tools, other[0], other[0].document.path,
                                       other[0].document.text)  # fmt: skip
        where = f"`{function.name}` is defined in `{path}`, line {function.first + 1}. "
        messages.append(self.say(where + self.explanation(function), function.doc))
        if self.chance(0.3):
            messages += self.request(function)
        return messages, schemas

    def write_agent(self) -> tuple[list[Message], list[Any]]:
        """Create a file (a module or a test), check it with a command, report."""
        function = self.one(self.documented or self.functions)
        path = function.document.path
        schemas, tools = self.toolbox(["write", "run", "read"])
        as_test = self.chance(0.5)
        target = f"tests/test_{path.rsplit('/', 1)[-1]}" if as_test else path
        body = self.test_for(function) if as_test else function.source + "\n"
        kind = "add_test" if as_test else "add"
        ask = self.fill(self.one(COMMANDS[kind]), f=function.name, path=target, source=path,
                        doc=(function.doc or function.name).rstrip(".").lower())  # fmt: skip
        messages = [*self.system(tools=True), {"role": "user", "content": ask}]
        if as_test or self.chance(0.4):
            messages += self.read_call(tools, function, path, function.document.text)
        command = f"pytest -q {target}" if as_test else f"python -m py_compile {target}"
        output = self.pytest_output(function, "", "", 0) if as_test else ""
        messages += [
            self.say(self.one(["", "", f"Writing `{target}`."]), f"Write {target}",
                     tools["write"](target, body)),
            self.result(self.fill(self.one(COMMANDS["written"]), path=target, size=len(body))),
            self.say("", "Check that it works", tools["run"](command)),
            self.result(output or self.one(["", "(no output)", "exit code 0"])),
            self.say(self.fill(self.one(COMMANDS["added"]), f=function.name, path=target,
                               doc=(function.doc or function.name).rstrip("."))),
        ]  # fmt: skip
        return messages, schemas

    def rows(self, record: dict[str, Any], count: int) -> list[dict[str, Any]]:
        """Make up rows of a table."""
        makers: dict[str, Callable[[], Any]] = {
            "id": lambda: self.rng.randint(1, 99999),
            "name": lambda: self.one(NAMES),
            "date": lambda: f"20{self.rng.randint(18, 26)}-{self.rng.randint(1, 12):02d}-"
                            f"{self.rng.randint(1, 28):02d}",
            "number": lambda: round(self.rng.uniform(0, 2000), self.rng.choice([0, 1, 2])),
            "flag": lambda: self.chance(0.5),
            "word": lambda: self.one(["open", "closed", "pending", "active", "failed", "paid",
                                      "draft", "north", "south", "basic", "pro", "retired"]),
        }  # fmt: skip
        return [
            {column: makers[record["columns"][column]]() for column in record["columns"]}
            for _ in range(count)
        ]

    def data_agent(self) -> tuple[list[Message], list[Any]]:
        """Query a database or an API, handle an error, answer from the JSON that came back."""
        record = self.one(RECORDS)
        columns = list(record["columns"])
        use_sql = self.chance(0.5)
        schemas, tools = self.toolbox(["sql" if use_sql else "http"])
        key, other = self.rng.sample(columns, 2)
        limit = self.rng.choice([1, 2, 3, 4, 5, 6, 8, 12])
        messages = self.system(tools=True)
        for _ in range(self.rng.choice([1, 1, 2, 3])):
            ask = self.fill(self.one(COMMANDS["data"]), table=record["table"], key=key,
                            other=other, limit=limit)  # fmt: skip
            messages.append({"role": "user", "content": ask})
            if use_sql:
                query = self.one(
                    [
                        f"SELECT {key}, {other} FROM {record['table']} ORDER BY {key}"
                        f" LIMIT {limit}",
                        f"SELECT * FROM {record['table']} WHERE {key} IS NOT NULL LIMIT {limit};",
                        f"SELECT {', '.join(columns)} FROM {record['table']} ORDER BY {other} DESC"
                        f" LIMIT {limit}",
                    ]
                )
                call, name = tools["sql"](query), "query"
            else:
                url = f"/api/v{self.rng.randint(1, 3)}/{record['table']}?limit={limit}&sort={key}"
                call, name = tools["http"](url, "GET"), "request"
            if self.chance(0.25):
                error = self.one(
                    [
                        f'{{"error": "no such column: {key}s"}}',
                        '{"status": 503, "error": "service unavailable"}',
                        f'ERROR: relation "{record["table"]}" does not exist',
                        '{"status": 429, "message": "rate limit exceeded", "retry_after": 2}',
                        "Error: timeout after 30 s",
                    ]
                )
                messages += [
                    self.say("", f"Send the {name}", call),
                    self.result(error),
                    self.say(self.one(["That failed; I try again.", "Let me retry.", ""]),
                             "It failed, retry once", call),
                ]  # fmt: skip
            else:
                messages.append(self.say("", f"Send the {name}", call))
            rows = self.rows(record, limit)
            rows = [{k: row[k] for k in (key, other)} for row in rows] if self.chance(0.5) else rows
            content = json.dumps(rows, indent=self.rng.choice([None, None, 2]))
            messages.append(self.result(content))
            messages.append(
                self.say(self.table_answer(record["table"], rows), "Summarise the rows")
            )
        return messages, schemas

    def table_answer(self, table: str, rows: list[dict[str, Any]]) -> str:
        """Answer with a Markdown table, a list or a sentence built from the rows."""
        columns = list(rows[0])
        if self.chance(0.4):
            head = "| " + " | ".join(columns) + " |\n|" + "---|" * len(columns)
            body = "\n".join("| " + " | ".join(str(r[c]) for c in columns) + " |" for r in rows)
            return f"Here are the {len(rows)} {table}:\n\n{head}\n{body}"
        if self.chance(0.6):
            return "\n".join(f"- {', '.join(f'{c}: {r[c]}' for c in columns[:4])}" for r in rows)
        return f"I found {len(rows)} {table}; the first has {columns[0]} {rows[0][columns[0]]}."
