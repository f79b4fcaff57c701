"""Targets, resuming, a second writer, full disks, interrupts."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from storekit import a_capture, a_model, a_stream, content, plain, write

from moetap.errors import MoetapError, UsageError
from moetap.store import TraceWriter, check_target, disk, parts, read

MODEL = a_model()
STREAMS = [a_stream(i, MODEL) for i in range(4)]


def ids(path: Path) -> list[str]:
    return [s.prompt_id for s in read(path).streams]


def unfinished(path: Path, n: int = 2) -> None:
    """What a run leaves that was interrupted after n streams."""
    with TraceWriter(path, MODEL, a_capture()) as writer:
        for stream in STREAMS[:n]:
            writer.append(stream)


def killed(path: Path, n: int = 2, resume: bool = False) -> None:
    """What a run leaves that was killed after n streams."""
    writer = TraceWriter(path, MODEL, a_capture(), resume=resume)
    for stream in STREAMS[len(writer.finished) : n]:
        writer.append(stream)
    os.close(writer._lock._fd)


def refusal(path: Path, resume: bool = False, force: bool = False) -> str:
    """The line that both check_target and TraceWriter refuse a target with, changing nothing."""
    before = sorted(p.name for p in path.parent.glob("**/*")) if path.parent.is_dir() else []
    with pytest.raises(MoetapError) as first:
        check_target(path, resume=resume, force=force)
    with pytest.raises(MoetapError) as second:
        TraceWriter(path, MODEL, a_capture(), resume=resume, force=force)
    assert str(first.value) == str(second.value)
    assert "\n" not in str(first.value)
    if path.parent.is_dir():
        assert sorted(p.name for p in path.parent.glob("**/*")) == before
    return str(first.value)


# Targets


def test_a_new_target_is_fine_and_untouched(tmp_path: Path) -> None:
    check_target(tmp_path / "t.h5", resume=False, force=False)
    check_target(tmp_path / "t.h5", resume=False, force=True)
    assert not list(tmp_path.iterdir())


def test_resume_and_force_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="choose one"):
        check_target(tmp_path / "t.h5", resume=True, force=True)


def test_an_existing_trace_is_not_overwritten(tmp_path: Path) -> None:
    write(tmp_path / "t.h5", STREAMS)
    assert "t.h5: already exists; --resume continues it, --force" in refusal(tmp_path / "t.h5")


def test_leftover_parts_are_not_overwritten(tmp_path: Path) -> None:
    killed(tmp_path / "t.h5")
    line = refusal(tmp_path / "t.h5")
    assert "t.h5.parts: has finished streams of an unfinished capture; --resume" in line


def test_a_folder_is_no_target(tmp_path: Path) -> None:
    assert "is a folder" in refusal(tmp_path, force=True)


def test_a_missing_folder(tmp_path: Path) -> None:
    assert "does not exist; create it first" in refusal(tmp_path / "no" / "t.h5")


def test_an_unwritable_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "cannot write to the folder" in refusal(tmp_path / "t.h5")


def test_a_folder_that_may_not_be_entered(tmp_path: Path) -> None:
    folder = tmp_path / "closed"
    folder.mkdir(mode=0)
    if os.access(folder, os.X_OK):
        pytest.skip("this user may enter everything")
    with pytest.raises(MoetapError, match="cannot write to the folder"):
        check_target(folder / "t.h5", resume=False, force=False)
    with pytest.raises(MoetapError, match="Permission denied"):
        read(folder / "t.h5")


def test_nothing_to_resume(tmp_path: Path) -> None:
    assert "nothing to resume" in refusal(tmp_path / "t.h5", resume=True)


def test_resuming_what_is_no_trace(tmp_path: Path) -> None:
    (tmp_path / "t.h5").write_text("notes")
    for how in ({"resume": True}, {"force": True}, {}):
        assert refusal(tmp_path / "t.h5", **how).startswith(
            f"{tmp_path / 't.h5'}: exists and is no"
        )
    assert (tmp_path / "t.h5").read_text() == "notes"


def test_resuming_a_complete_trace(tmp_path: Path) -> None:
    write(tmp_path / "t.h5", STREAMS)
    assert "already complete; --force" in refusal(tmp_path / "t.h5", resume=True)


def test_force_overwrites_trace_and_parts(tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    unfinished(path, 2)
    killed(path, 3, resume=True)
    old = read(path).run_id
    assert ids(path) == ["prompt-0", "prompt-1", "prompt-2"]
    with TraceWriter(path, MODEL, a_capture(), force=True) as writer:
        assert writer.finished == frozenset()
        assert read(path).run_id == old  # until there is something to replace it
        writer.append(STREAMS[3])
        assert read(path).run_id != old
    assert ids(path) == ["prompt-3"]
    assert read(path).run_id != old


def test_force_without_a_stream_leaves_the_old_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    write(path, STREAMS[:2])
    before = path.read_bytes()
    with TraceWriter(path, MODEL, a_capture(), force=True):
        assert read(path).complete
    assert path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t.h5"]


# Appending


def test_finished_and_order_over_resumes(tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    order = [STREAMS[i] for i in (2, 0, 3, 1)]
    for n, stream in enumerate(order):
        with TraceWriter(path, MODEL, a_capture(), resume=n > 0) as writer:
            assert writer.finished == {s.prompt_id for s in order[:n]}
            writer.append(stream)
            assert writer.finished == {s.prompt_id for s in order[: n + 1]}
            if n == 3:
                writer.close(complete=True)
    trace = read(path)
    assert trace.complete
    assert [plain(s) for s in trace.streams] == [plain(s) for s in order]


def test_metadata_are_those_of_the_first_run(tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    unfinished(path)
    first = read(path)
    moved = a_capture(chip="Apple M4", os="macOS 26.1", moetap_version="0.2.0")
    with TraceWriter(path, a_model(id="/elsewhere/tiny"), moved, resume=True) as writer:
        writer.append(STREAMS[2])
    assert content(read(path), ("streams",)) | {"streams": []} == content(first) | {"streams": []}


def test_a_mode_that_was_not_recorded(tmp_path: Path) -> None:
    """As importers leave it; any mode but the known ones is refused when it is made."""
    path = tmp_path / "t.h5"
    with TraceWriter(path, MODEL, a_capture(moetap_version="", mode="")) as writer:
        for stream in STREAMS:
            writer.append(stream)
        writer.close(complete=True)
    assert (read(path).capture.mode, read(path).capture.imported) == ("", True)
    with pytest.raises(MoetapError, match="mode is 'both', expected resident or streaming"):
        a_capture(mode="both")


def swap_growth(path: Path) -> int | None:
    return read(path).capture.swap_growth_bytes


def test_swap_growth_is_the_largest_of_all_sessions(tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    for growth, most in ((300, 300), (100, 300), (None, 300), (700, 700)):
        with TraceWriter(path, MODEL, a_capture(), resume=path.exists()) as writer:
            writer.append(STREAMS[len(writer.finished)])
            writer.note_swap(growth)
            writer.note_swap(-9)
        assert swap_growth(path) == most


def test_swap_growth_that_nobody_knows_is_absent(tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    with TraceWriter(path, MODEL, a_capture()) as writer:
        writer.append(STREAMS[0])
        writer.note_swap(None)
    assert swap_growth(path) is None
    with TraceWriter(path, MODEL, a_capture(), resume=True) as writer:
        writer.note_swap(-5)  # swap shrank
    assert swap_growth(path) == 0


def test_swap_growth_survives_kills(tmp_path: Path) -> None:
    """It is stored with the streams, so what was known when one was appended is not lost."""
    path = tmp_path / "t.h5"
    for growth, most in ((300, 300), (100, 300), (700, 700)):
        writer = TraceWriter(path, MODEL, a_capture(), resume=growth != 300)
        writer.note_swap(growth)
        writer.append(STREAMS[len(writer.finished)])
        os.close(writer._lock._fd)
        assert swap_growth(path) == most
    with TraceWriter(path, MODEL, a_capture(), resume=True) as writer:
        writer.append(STREAMS[3])
        writer.close(complete=True)
    assert swap_growth(path) == 700


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (STREAMS[0], "is stored already"),
        (replace(STREAMS[1], experts=STREAMS[1].experts[:, :, :3]), "experts have shape"),
        (a_stream(1, MODEL, scores=True), "has scores, but scores_kind is ''"),
        (replace(STREAMS[1], tokens=STREAMS[1].tokens.astype(np.int64)), "tokens are int64"),
        (replace(STREAMS[1], prompt_id="a\0b"), "cannot be stored"),
        (replace(STREAMS[1], cls="\ud800"), "cannot be stored"),
    ],
)
def test_impossible_streams_are_refused(tmp_path: Path, stream: Any, expected: str) -> None:
    path = tmp_path / "t.h5"
    with TraceWriter(path, MODEL, a_capture()) as writer:
        writer.append(STREAMS[0])
        with pytest.raises(MoetapError, match=expected):
            writer.append(stream)
        writer.append(STREAMS[2])
    assert ids(path) == ["prompt-0", "prompt-2"]


def test_missing_scores_are_refused(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t.h5", MODEL, a_capture(scores_kind="softmax"))
    with writer, pytest.raises(MoetapError, match="has no scores"):
        writer.append(STREAMS[0])


def test_complete_needs_all_streams(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.h5", MODEL, a_capture()) as writer:
        writer.append(STREAMS[0])
        with pytest.raises(MoetapError, match="has 1 of 4 streams"):
            writer.close(complete=True)
    assert not read(tmp_path / "t.h5").complete


def test_a_closed_writer_takes_nothing(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.h5", MODEL, a_capture()) as writer:
        writer.close(complete=False)
        writer.close(complete=False)
        with pytest.raises(MoetapError, match="is closed"):
            writer.append(STREAMS[0])


# Resuming

DIFFERENT: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("config_sha256", {"config_sha256": "d"}, {}),
    ("weights_sha256", {"weights_sha256": "d"}, {}),
    ("layer_index", {"layer_index": np.array([1, 2, 6])}, {}),
    ("n_experts", {"n_experts": np.array([16, 300, 9])}, {}),
    ("top_k", {"top_k": np.array([4, 6, 2])}, {}),
    ("expert_bytes", {"expert_bytes": np.array([1, 2, 3])}, {}),
    ("temp", {}, {"temp": 0.7}),
    ("top_p", {}, {"top_p": 0.9}),
    ("seed", {}, {"seed": 8}),
    ("max_tokens", {}, {"max_tokens": 9}),
    ("prefill_step", {}, {"prefill_step": 9}),
    ("full_prefill", {}, {"full_prefill": True}),
    ("mode", {}, {"mode": "streaming"}),
    ("slots", {}, {"slots": 64}),
    ("mix_sha256", {}, {"mix_sha256": "d"}),
    ("n_prompts", {}, {"n_prompts": 5}),
    ("chat_template_sha256", {}, {"chat_template_sha256": "d"}),
    ("thinking", {}, {"thinking": False}),
    ("scores_kind", {}, {"scores_kind": "softmax"}),
    ("backend", {}, {"backend": "cpu"}),
    ("mlx_version", {}, {"mlx_version": "0.32.5"}),
    ("mlx_lm_version", {}, {"mlx_lm_version": "0.32.5"}),
]


@pytest.mark.parametrize(("name", "model", "capture"), DIFFERENT, ids=[d[0] for d in DIFFERENT])
@pytest.mark.parametrize("leave", [unfinished, killed])
def test_resuming_with_other_settings_is_refused(
    tmp_path: Path,
    name: str,
    model: dict[str, Any],
    capture: dict[str, Any],
    leave: Callable[[Path], None],
) -> None:
    path = tmp_path / "t.h5"
    leave(path)
    before = content(read(path))
    with pytest.raises(MoetapError) as caught:
        TraceWriter(path, a_model(**model), a_capture(**capture), resume=True)
    (new,) = (model | capture).values()
    old = getattr(MODEL if model else a_capture(), name)
    shown = [repr(v.tolist() if isinstance(v, np.ndarray) else v) for v in (old, new)]
    assert f"{name} differs: {shown[0]} in the trace, {shown[1]} now" in str(caught.value)
    assert content(read(path)) == before
    with TraceWriter(path, MODEL, a_capture(), resume=True) as writer:
        assert len(writer.finished) == 2


def test_traces_of_two_runs_are_not_mixed(tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    killed(path)
    write(tmp_path / "other.h5", STREAMS[2:], complete=False)
    (tmp_path / "other.h5").rename(path)
    with pytest.raises(MoetapError, match="belongs to run"):
        read(path)


def test_leftover_temporaries_are_ignored_and_cleaned(tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    killed(path)
    folder = parts.folder(path)
    for name in ("00000003.tmp", "merged.tmp", "._00000001.h5", ".DS_Store"):
        (folder / name).write_bytes(b"\x89HDF\r\n\x1a\n half")
    assert ids(path) == ["prompt-0", "prompt-1"]
    with TraceWriter(path, MODEL, a_capture(), resume=True):
        assert not list(folder.glob("*.tmp"))
    assert ids(path) == ["prompt-0", "prompt-1"]


# Two writers


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    with TraceWriter(path, MODEL, a_capture()) as writer:
        for how in ({"resume": True}, {"force": True}, {}):
            assert "another capture is writing" in refusal(path, **how)
        writer.append(STREAMS[0])
    with TraceWriter(path, MODEL, a_capture(), resume=True) as writer:
        assert writer.finished == {"prompt-0"}


def test_a_lock_on_a_deleted_file_does_not_count(tmp_path: Path) -> None:
    """A writer that opened the lock file just before its holder finished must not believe it."""
    folder = tmp_path / "t.h5.parts"
    first = disk.Lock(folder)
    real, calls = disk._is_open_at, []

    def finish_first(fd: int, path: Path) -> bool:
        calls.append(fd)
        if len(calls) == 1:
            path.unlink()
        return real(fd, path)

    os.close(first._fd)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "_is_open_at", finish_first)
        second = disk.Lock(folder)
    assert len(calls) == 2
    with pytest.raises(MoetapError, match="another capture"):
        disk.Lock(folder)
    second.release()
    assert not folder.exists()


# Failing disks and interrupts


def test_a_file_in_place_of_the_parts_folder(tmp_path: Path) -> None:
    (tmp_path / "t.h5.parts").touch()
    assert "cannot begin: File exists" in str(
        pytest.raises(MoetapError, TraceWriter, tmp_path / "t.h5", MODEL, a_capture()).value
    )


def test_an_interrupt_while_appending_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "t.h5"

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), TraceWriter(path, MODEL, a_capture()) as writer:
        writer.append(STREAMS[0])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(disk, "publish", interrupt)
            writer.append(STREAMS[1])
    assert [p.name for p in tmp_path.iterdir()] == ["t.h5"]
    assert ids(path) == ["prompt-0"]


def full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("where", ["write_bytes", "fsync", "replace"])
def test_disk_full_in_append(tmp_path: Path, where: str) -> None:
    path = tmp_path / "t.h5"
    with pytest.raises(MoetapError) as caught, TraceWriter(path, MODEL, a_capture()) as writer:
        writer.append(STREAMS[0])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path if where == "write_bytes" else os, where, full)
            writer.append(STREAMS[1])
    assert str(caught.value) == (
        f"{path}: cannot store stream 'prompt-1': No space left on device; finished streams are "
        f"kept in {path}.parts, --resume continues"
    )
    assert ids(path) == ["prompt-0"]


@pytest.mark.parametrize("where", ["sink", "fsync", "replace"])
def test_disk_full_in_close(tmp_path: Path, where: str) -> None:
    path = tmp_path / "t.h5"
    writer = TraceWriter(path, MODEL, a_capture())
    for stream in STREAMS:
        writer.append(stream)
    with pytest.MonkeyPatch.context() as patch:
        if where == "sink":
            patch.setattr(disk.Sink, "__init__", failing_from_the_start)
        else:
            patch.setattr(os, where, full)
        with pytest.raises(MoetapError, match="cannot write the trace: No space left on device"):
            writer.close(complete=True)
    assert not path.exists()
    assert not list(parts.folder(path).glob("*.tmp"))
    assert ids(path) == [s.prompt_id for s in STREAMS]
    with TraceWriter(path, MODEL, a_capture(), resume=True) as writer:
        assert len(writer.finished) == 4
        writer.close(complete=True)
    assert read(path).complete


def failing_from_the_start(sink: disk.Sink, path: Path) -> None:
    sink._file = open(path, "w+b", buffering=0)  # noqa: SIM115
    sink.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_failing_exit_does_not_hide_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(ZeroDivisionError) as caught,
        TraceWriter(path, MODEL, a_capture()) as writer,
    ):
        writer.append(STREAMS[0])
        patch.setattr(os, "replace", full)
        raise ZeroDivisionError
    assert "finished streams are kept" in caught.value.__notes__[0]
    assert ids(path) == ["prompt-0"]
    check_target(path, resume=True, force=False)


LIMITED = """
import resource, sys
from pathlib import Path
from storekit import a_capture, a_model, a_stream
from moetap.errors import MoetapError
from moetap.store import TraceWriter

writer = TraceWriter(Path(sys.argv[1]), a_model(), a_capture(n_prompts=8))
for number in range(8):
    writer.append(a_stream(number, a_model(), rows=300))
resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))
try:
    writer.close(complete=True)
except MoetapError as error:
    print(error)
"""


def test_a_real_limit_in_close(tmp_path: Path) -> None:
    """The system itself refuses to let the merged file grow.

    HDF5 must not notice: it would crash the interpreter at its end.
    """
    path = tmp_path / "t.h5"
    ended = subprocess.run(
        [sys.executable, "-c", LIMITED, str(path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "cannot write the trace: File too large; finished streams are kept" in ended.stdout
    assert len(ids(path)) == 8
    with TraceWriter(path, MODEL, a_capture(n_prompts=8), resume=True) as writer:
        writer.close(complete=True)
    expected = [plain(a_stream(i, MODEL, rows=300)) for i in range(8)]
    assert [plain(s) for s in read(path).streams] == expected


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_leaving_by_an_exception_keeps_everything(
    tmp_path: Path, error: type[BaseException]
) -> None:
    path = tmp_path / "t.h5"
    with pytest.raises(error), TraceWriter(path, MODEL, a_capture()) as writer:
        writer.append(STREAMS[0])
        writer.append(STREAMS[1])
        raise error
    assert [p.name for p in tmp_path.iterdir()] == ["t.h5"]
    assert ids(path) == ["prompt-0", "prompt-1"]
    assert not read(path).complete


def test_ctrl_c_during_the_merge_is_raised_after_it(tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    real = disk.publish

    def interrupted(temporary: Path, final: Path) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        real(temporary, final)

    writer = TraceWriter(path, MODEL, a_capture())
    for stream in STREAMS:
        writer.append(stream)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(disk, "publish", interrupted)
        writer.close(complete=True)
    assert [p.name for p in tmp_path.iterdir()] == ["t.h5"]
    assert read(path).complete
