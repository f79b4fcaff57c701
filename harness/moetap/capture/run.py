"""The capture: prompts in, finished streams out, one at a time.

Knows how a prompt becomes tokens, how a stream is seeded, and which rows would betray a broken
hook. Knows neither files (`moetap.store`) nor terminals (`moetap.cli`), and leaves MLX to `_mlx`
and `tap`.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from moetap._version import __version__
from moetap.analysis.loops import looped_from
from moetap.capture import _machine, _mlx
from moetap.capture.streaming.kernel import DEPENDENT, ROW_KERNEL
from moetap.capture.tap import Rows, tap
from moetap.errors import MoetapError, first_line
from moetap.prompts import Prompt, PromptMix
from moetap.trace import NOT_EXECUTED, RESIDENT, STREAMING, CaptureInfo, ModelInfo, Stream


@dataclass(frozen=True)
class Settings:
    """What a capture can be asked for; the command line's options of the same names."""

    max_tokens: int = 512
    temp: float = 0.0
    top_p: float = 0.0
    seed: int = 0
    prefill_step: int = 2048
    full_prefill: bool = False
    scores: bool = False
    thinking: bool = False


@dataclass(frozen=True)
class Task:
    """A prompt and the tokens that the model's chat template makes of it."""

    prompt: Prompt
    tokens: tuple[int, ...]


class Watcher(Protocol):
    """Who is told how far a capture is. An exception raised here ends the stream in progress and
    the capture.
    """

    def start(self, prompt_id: str, n_prompt: int) -> None: ...

    def prefill(self, done: int, total: int) -> None: ...

    def token(self, n_generated: int) -> None: ...


def prepare(
    loaded: _mlx.Loaded | _mlx.Opened, prompts: Iterable[Prompt], thinking: bool
) -> tuple[list[Task], list[tuple[str, str]]]:
    """Render every prompt with the model's chat template: (tasks, prompts that it cannot render
    with the reason).

    Some templates refuse system or tool messages; the other prompts are still worth capturing.
    Raises MoetapError if the tokenizer has no chat template or none of the prompts can be rendered.
    """
    if chat_template(loaded) == "":
        raise MoetapError(
            f"{loaded.info.id}: the tokenizer has no chat template; use an "
            "instruction-tuned model, "
            "or put a chat_template.jinja into the model folder"
        )
    tasks, refused = [], []
    for prompt in prompts:
        try:
            text = _render(loaded.tokenizer, prompt, thinking)
        # Templates are programs of the model's authors: raise_exception() in them, or any failing
        # filter, ends here.
        except Exception as error:
            refused.append((prompt.id, f"the chat template refuses it ({first_line(error)})"))
            continue
        tokens = tuple(loaded.tokenizer.encode(text, add_special_tokens=False))
        if tokens:
            tasks.append(Task(prompt, tokens))
        else:
            refused.append((prompt.id, "the chat template makes no tokens of it"))
    if not tasks:
        raise MoetapError(
            f"{loaded.info.id}: its chat template renders none of the prompts; "
            f"the first: {refused[0][1]}"
            if refused
            else "no prompts to capture"
        )
    return tasks, refused


def _render(tokenizer: Any, prompt: Prompt, thinking: bool) -> str:
    messages = []
    for message in prompt.messages:
        message = dict(message)
        if isinstance(message.get("content"), list):
            message["content"] = "".join(part.get("text", "") for part in message["content"])
        elif message.get("content") is None:
            message["content"] = ""
        if "tool_calls" in message:
            message["tool_calls"] = [_with_parsed_arguments(c) for c in message["tool_calls"]]
        messages.append(message)
    text: str = tokenizer.apply_chat_template(
        messages,
        tools=list(prompt.tools) or None,
        add_generation_prompt=True,
        tokenize=False,
        enable_thinking=thinking,
    )
    return text


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """OpenAI sends arguments as a JSON string; chat templates (and mlx-lm's server) iterate over an
    object.
    """
    function = dict(call.get("function", {}))
    if isinstance(function.get("arguments"), str):
        function["arguments"] = json.loads(function["arguments"] or "{}")
    return call | {"function": function}


def chat_template(loaded: _mlx.Loaded | _mlx.Opened) -> str:
    """The template's source, "" if there is none. Several named templates: all of them, as JSON."""
    template = getattr(loaded.tokenizer, "chat_template", None) or ""
    return template if isinstance(template, str) else json.dumps(template, sort_keys=True)


def describe(
    loaded: _mlx.Loaded,
    settings: Settings,
    mix: PromptMix,
    tasks: Sequence[Task],
    untraced_tokens_per_s: float | None = None,
) -> CaptureInfo:
    """How this capture is made, for the trace."""
    taken = {task.prompt.id for task in tasks}
    engine = loaded.engine
    template = chat_template(loaded)
    return CaptureInfo(
        moetap_version=__version__,
        mlx_version=_mlx.MLX_VERSION,
        mlx_lm_version=_mlx.MLX_LM_VERSION,
        backend=_mlx.backend(),
        device_json=_mlx.device_json(),
        chip=_machine.chip(),
        ram_bytes=_machine.ram_bytes(),
        os=_machine.operating_system(),
        temp=settings.temp,
        top_p=settings.top_p,
        seed=settings.seed,
        max_tokens=settings.max_tokens,
        prefill_step=settings.prefill_step,
        full_prefill=settings.full_prefill,
        mode=STREAMING if engine else RESIDENT,
        slots=engine.slots if engine else None,
        policy=engine.policy.name if engine else None,
        cold_reads=engine.cold if engine else None,
        expert_kernel=ROW_KERNEL if engine is None or engine.independent else DEPENDENT,
        mix_name=mix.name,
        mix_version=mix.version,
        mix_sha256=mix.sha256,
        n_prompts=len(tasks),
        left_out=",".join(p.id for p in mix.prompts if p.id not in taken),
        chat_template_sha256=hashlib.sha256(template.encode()).hexdigest(),
        thinking=settings.thinking if "enable_thinking" in template else None,
        untraced_tokens_per_s=untraced_tokens_per_s,
        scores_kind="gate weights as applied to the experts' outputs" if settings.scores else "",
    )


def stream_seed(seed: int, prompt: Prompt) -> int:
    """Seed of one stream: the first 4 bytes, big-endian, of SHA-256 over "<seed>:<prompt sha256>".

    Each stream has its own, so that a resumed run, a subset or another order of prompts samples the
    same tokens.
    """
    digest = hashlib.sha256(f"{seed}:{prompt.sha256}".encode()).digest()
    return int.from_bytes(digest[:4], "big")


_RATE_TOKENS = 33  # the first one ends the prefill and is not timed


def untraced_rate(loaded: _mlx.Loaded, task: Task, settings: Settings) -> float | None:
    """Decode rate in tokens/s of a short untapped run, None if the experts are not in memory or the
    stream ends within 8 tokens. No rate of a traced run is quoted without it.
    """
    if loaded.engine or settings.max_tokens <= 8:
        return None
    stamps: list[float] = []
    _generate(
        loaded,
        task,
        settings,
        min(_RATE_TOKENS, settings.max_tokens),
        lambda _done, _total: None,
        lambda _n: stamps.append(time.perf_counter()),
    )
    return (len(stamps) - 1) / (stamps[-1] - stamps[0]) if len(stamps) > 8 else None


def _generate(
    loaded: _mlx.Loaded,
    task: Task,
    settings: Settings,
    max_tokens: int,
    on_prefill: Callable[[int, int], None],
    on_token: Callable[[int], None],
) -> tuple[list[int], str]:
    """The task's tokens and why they ended; whatever MLX raises becomes one line."""
    try:
        return _mlx.generate(
            loaded,
            task.tokens,
            max_tokens=max_tokens,
            temp=settings.temp,
            top_p=settings.top_p,
            seed=stream_seed(settings.seed, task.prompt),
            prefill_step=settings.prefill_step,
            on_prefill=on_prefill,
            on_token=on_token,
        )
    except MoetapError:
        raise
    except Exception as error:  # MLX: RuntimeError for all that a device cannot do
        raise MoetapError(
            f"stream {task.prompt.id!r}: generation failed ({first_line(error)}); finished "
            "streams are kept, --resume continues"
        ) from error


def capture(
    loaded: _mlx.Loaded, tasks: Sequence[Task], settings: Settings, watcher: Watcher
) -> Iterator[Stream]:
    """Generate the tasks' streams one after another and yield each when it is finished.

    Raises MoetapError if the rows of a stream cannot be real (constant, repeated, missing).
    """
    engine = loaded.engine
    for task in tasks:
        watcher.start(task.prompt.id, len(task.tokens))
        if engine:
            engine.start(len(task.tokens), settings.full_prefill)
        with tap(loaded.model, scores=settings.scores, full_prefill=settings.full_prefill) as rows:
            generated, reason = _generate(
                loaded, task, settings, settings.max_tokens, watcher.prefill, watcher.token
            )
            recorded = rows.take()
        measured = engine.take(len(generated)) if engine else None
        _check(task.prompt.id, recorded, [*task.tokens, *generated[:-1]], loaded.info)
        yield Stream(
            prompt_id=task.prompt.id,
            cls=task.prompt.cls,
            prompt_sha256=task.prompt.sha256,
            n_prompt=len(task.tokens),
            n_generated=len(generated),
            finish_reason=reason,
            looped_from=looped_from(generated),
            experts=recorded.experts,
            tokens=recorded.tokens,
            position=recorded.position,
            scores=recorded.scores,
            io=measured,
        )


def _check(prompt_id: str, rows: Rows, fed: list[int], model: ModelInfo) -> None:
    """Refuse rows that a working hook cannot produce; a wrong trace is worse than none."""
    if rows.tokens.tolist() != fed:
        raise MoetapError(
            f"stream {prompt_id!r}: {len(rows.tokens)} rows recorded for {len(fed)} tokens fed, "
            "or not those tokens; "
            "mlx-lm's loop differs from the one this version of moetap knows"
        )
    if (model.top_k == model.n_experts).all():
        return  # every row is the set of all experts
    # Router inputs differ from token to token, so whole rows hardly ever repeat while the tokens
    # change. A buffer that is read too late or not at all repeats always.
    changes = rows.tokens[1:] != rows.tokens[:-1]
    ran = (rows.experts[1:] != NOT_EXECUTED).any(axis=(1, 2))
    repeats = ran & (rows.experts[1:] == rows.experts[:-1]).all(axis=(1, 2))
    n = int(changes.sum())
    if n >= 16 and int((changes & repeats).sum()) > n // 2:
        raise MoetapError(
            f"stream {prompt_id!r}: more than half of the rows repeat the row before "
            "although the tokens change; "
            "the routing was not recorded correctly on this machine"
        )
