"""Does it pay to read the next layer's predicted experts ahead, past the page cache?

    python benchmarks/readahead.py predict TRACE... [--model FOLDER]
    python benchmarks/readahead.py time FOLDER --slots 64 --cases 1:1,0.3:0.4 [--disk GB/s]

`predict` replays decode rows through LRU with C = E / 4 and E / 2 slots a layer and lets
predictors, which know earlier tokens alone, name m experts of layer l + 1 that are not resident,
layer l's being known. precision: share of them that the step needs; recall: share of the misses
that they are; extra bytes: the wrong ones, of the misses' bytes. "sure": the surest quarter of the
cells, m = 1. "next router": layer l + 1's router applied to layer l's expert input. At m = 2,
precision / recall (frequency and its mixture with co-occurrence, "both", are never better):

    trace                            C = E / 4              C = E / 2
    gpt-oss-20b    co-occurrence     0.33 / 0.51  +103 %    0.10 / 0.53  +502 %
    qwen3-30b-a3b  co-occurrence     0.18 / 0.32  +147 %    0.06 / 0.22  +374 %
    tiny model     co-occurrence     0.22 / 0.16   +56 %    0.13 / 0.15  +103 %
    tiny model     next router       0.49 / 0.35   +37 %    0.33 / 0.39   +79 %

`time` puts read-ahead on the real engine and decodes the same tokens with and without it, in turn,
with O_DIRECT. Predictions are read behind layer l's own reads into memory beside the slots, so that
misses stay those of the policy (asserted); what is staged is copied, what is not needed is called
off unless it has begun. Predictions are made up: a first run says what misses, each miss is
predicted with probability recall, wrong experts are added until precision is right. 2 x86 cores,
virtual disk, 8 layers of the true geometry (`streaming.py`); random weights route almost evenly, so
5 to 6 experts a layer miss. Layer 0 has nothing to be predicted from. Medians of 3 pairs of 20 to
22 tokens (emulated disk: 10), the first third left out; an earlier run had 1.02 in the second row:

    disk        C    precision recall   ms a token     wait ms     MB a token   ratio
    as it is    64   1.00  1.00         510 ->  507     65 ->  17    90 ->  90   0.99 (0.97-1.03)
    as it is    64   0.49  0.35         510 ->  514     65 ->  67    90 -> 118   1.00 (1.00-1.05)
    as it is    64   0.18  0.32         510 ->  528     65 ->  65    90 -> 203   1.04 (1.02-1.07)
    as it is    128  1.00  1.00         478 ->  486     60 ->  15    82 ->  82   1.01 (0.99-1.02)
    as it is    128  0.33  0.39         478 ->  496     60 ->  57    82 -> 139   1.02 (1.00-1.04)
    as it is    128  0.06  0.13         478 ->  505     60 ->  73    82 -> 229   1.05 (1.04-1.07)
    0.15 GB/s   64   1.00  1.00        1080 ->  734    684 -> 323   102 -> 102   0.68 (0.67-0.69)
    0.15 GB/s   64   0.49  0.35        1080 -> 1015    684 -> 628   102 -> 133   0.94 (0.93-0.94)
    0.15 GB/s   64   0.18  0.32        1080 -> 1250    684 -> 843   102 -> 180   1.14 (1.13-1.17)

Cases of a round share the run without read-ahead; their order changes from round to round. On this
disk not even an oracle wins: it waits 48 ms less and is 3 ms faster, presumably since the two cores
that compute also serve the reads. The emulated disk (--disk) is slow without taking a core, as on a
machine that waits for its reads.

The arithmetic of such a machine, per layer: i = computing while the disk idles; r = misses x bytes
of an expert / bandwidth; t = the read of one expert. Without read-ahead T = i + r. With it, T' = i
+ r - g + d: the gain g is at most min(recall r, precision i), since the disk is free for i only,
and d is what wrong reads that have begun still take. An oracle's T' / T is 1 - min(i, r) / (i + r).
Where i < t, one expert can be begun: it wins precision i - (1 - precision)(t - i), so it must be
right with precision 1 - i / t only to break even.
Example: 1.77 MB an expert, 3.4 GB/s (M4), 2.8 misses a layer, 14 ms of computing in 40 layers (an
assumption): i = 0.35, r = 1.45, t = 0.52 ms. Oracle 0.81; break-even at precision 0.33; next router
(0.56 at m = 1) 0.93; co-occurrence of the tiny model (0.25) 1.02, of gpt-oss-20b (0.41) 0.98.

Conclusion: not kept. On cold reads here not even an oracle wins; where reads are the limit, counts
win 2 per cent at best and lose 14 at worst, and the next router, known from one tiny model only,
wins about 6, for 16 to 80 % more bytes from the flash, a hook per model family, and measured reads
that are no longer those of the misses. To be asked again on a Mac, with a large model's own next
router.
"""

from __future__ import annotations

import argparse
import itertools
import mmap
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep

import numpy as np

from moetap.capture.streaming import reads
from moetap.capture.streaming.engine import Engine, Layer
from moetap.capture.streaming.slots import SlotTable
from moetap.policies.lru import LRU
from moetap.store import read
from moetap.trace import NOT_EXECUTED, Stream, Trace

DEPTHS = (1, 2, 4, 8)
"""m: experts read ahead per layer and step."""


# -- predict: how good are predictions?


class Counts:
    """How often expert j of layer l + 1 was selected by a token that selected i of layer l."""

    def __init__(self, n_layers: int, n_experts: int) -> None:
        self.both = np.zeros((n_layers - 1, n_experts, n_experts), np.float32)
        self.single = np.zeros((n_layers, n_experts), np.float32)
        self.rows = np.zeros(n_layers, np.float32)

    def learn(self, row: Sequence[Sequence[int]]) -> None:
        """A token's experts in every layer."""
        for layer, experts in enumerate(row):
            if experts:
                self.single[layer, experts] += 1
                self.rows[layer] += 1
        for layer, (here, there) in enumerate(itertools.pairwise(row)):
            self.both[layer][np.ix_(here, there)] += 1

    def scores(self, layer: int, experts: Sequence[int]) -> dict[str, np.ndarray]:
        """Per predictor, of layer + 1's experts, those of `layer` being known: (E,)."""
        often = self.single[layer + 1] / max(self.rows[layer + 1], 1)
        both, single = self.both[layer][experts], self.single[layer][experts, None]
        # Means of P(j | i); the second believes the frequency until it has seen i eight times.
        return {
            "frequency": often,
            "co-occurrence": (both / np.maximum(single, 1)).mean(axis=0),
            "both": ((both + 8 * often) / (single + 8)).mean(axis=0),
        }


def predict(path: str, folder: str | None) -> None:
    """Print the table of one trace; folder: of its model, for the router's own prediction."""
    trace = read(path)
    n_layers, n = trace.model.n_layers, int(trace.model.n_experts.max())
    router = _router_scores(trace, folder) if folder else {}
    print(f"{Path(path).name}: E = {n}, k = {trace.model.max_top_k}, {n_layers} layers")
    print("   C predictor       m  precision  recall  extra bytes")
    for slots in (n // 4, n // 2):
        counts = Counts(n_layers, n)
        # predictor -> per prediction in order of m: (score, needed); and all misses to cover
        found: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
        misses = steps = free = 0
        for number, stream in enumerate(trace.streams):
            tables = [SlotTable(slots, LRU().online(n, slots)) for _ in range(n_layers)]
            start = len(stream.prefill())
            for i, row in enumerate(_rows(stream)):
                if i < start:
                    counts.learn(row)
                    continue
                if i >= start + len(stream.decode()):
                    break
                for layer, there in enumerate(row[1:]):
                    held = list(tables[layer + 1].slot_of)
                    missing = set(there) - set(held)
                    misses += len(missing)
                    steps += 1
                    free += n - len(held)
                    scores = counts.scores(layer, row[layer])
                    if router:
                        scores["next router"] = router[number][layer, i]
                    for name, score in scores.items():
                        score = score.astype(np.float64)
                        score[held] = -np.inf
                        best = np.argsort(-score, kind="stable")[: max(DEPTHS)]
                        hit = np.array([e in missing for e in best.tolist()])
                        found.setdefault(name, []).append((score[best], hit))
                for table, experts in zip(tables, row, strict=True):
                    table.request(experts)
                counts.learn(row)
        print(f"{slots:4d} {misses / steps:.2f} misses a layer; a guess hits {misses / free:.1%}")
        for name, pairs in found.items():
            score, hit = (np.array(x) for x in zip(*pairs, strict=True))
            for m in DEPTHS:
                _print(slots, name, f"{m}", hit[:, :m].sum(), hit[:, :m].size, misses)
            # The best that a threshold on the score could do, chosen in hindsight.
            sure = np.argsort(-score[:, 0])[: len(score) // 4]
            _print(slots, name, "sure", hit[sure, 0].sum(), len(sure), misses)


def _print(slots: int, name: str, m: str, hits: int, n_read: int, misses: int) -> None:
    print(
        f"{slots:4d} {name:14} {m:>4}  {hits / n_read:9.2f}  {hits / misses:6.2f}"
        f"  {(n_read - hits) / misses:+11.0%}"
    )


def _rows(stream: Stream) -> Iterator[list[list[int]]]:
    """Per row and layer the experts selected, none where the layer did not run."""
    for row in stream.experts:
        yield [[e for e in cell if e != NOT_EXECUTED] for cell in row.tolist()]


def _router_scores(trace: Trace, folder: str) -> list[np.ndarray]:
    """Per stream what each next layer's router says about this layer's expert input, (L - 1, rows,
    E): the trace's tokens are fed again.
    """
    import mlx.core as mx

    from moetap.capture import _mlx
    from moetap.capture.tap import _hooked, find_switches

    model = _mlx.load(folder).model
    inputs: list[mx.array] = []
    gates = []

    def hook(original: type) -> type:
        def call(self, x, indices):
            inputs.append(x)
            return original.__call__(self, x, indices)

        return _hooked(original, call)

    for switch in find_switches(model):
        block = model
        for name in switch.path.split(".")[:-1]:
            block = block[int(name)] if name.isdigit() else block[name]
        gates.append(block.gate)
        switch.module.__class__ = hook(type(switch.module))
    out = []
    for stream in trace.streams:
        inputs.clear()
        model(mx.array(stream.tokens[None].astype(np.int32)))
        ahead = [gate(x)[0] for gate, x in zip(gates[1:], inputs[:-1], strict=True)]
        out.append(np.array(mx.stack(ahead).astype(mx.float32)))
    return out


# -- time: what is a precision and recall worth?


class Staged:
    """An expert that is read ahead into memory of its own, in a few tasks, so that those not begun
    can be called off. For the reader it is also the file that the expert's slot is filled from.
    """

    TASKS = 3

    def __init__(self, ahead: Ahead, layer: Layer, expert: int) -> None:
        self._ahead, self._step, self._memory = ahead, ahead.step, ahead.memory()
        self._parts: list[tuple] = []
        self._over, at = False, 0
        for file, begin, numbers in layer._runs[expert]:
            n_bytes = sum(layer._arenas[number].slot_bytes for number in numbers)
            start, length = reads.enclosing(begin, n_bytes)
            view = memoryview(self._memory)[at : at + length]
            self._parts.append((file, start, view, begin - start, n_bytes, numbers))
            at += length
        self.runs = [(self, 0, tuple(n for part in self._parts for n in part[5]))]
        self._batch = reads.Batch(self.TASKS)
        for i in range(self.TASKS):
            ahead.reader._tasks.put((self._batch, [(_Piece(self), i, ())], ()))

    def read(self, i: int) -> None:
        """Task i, for a thread of the reader."""
        if self._over:
            return
        for file, start, view, skip, n_bytes, _ in self._parts[i :: self.TASKS]:
            file._pread(start, [view], skip + n_bytes, reads.PAGE)
            self._ahead.read.append((self._step, n_bytes))

    def fill(self, _begin: int, buffers: list[memoryview]) -> int:
        """Into a slot, once it is there. For a thread of the reader, where its tasks are ahead."""
        self._batch.wait()
        left = iter(buffers)
        for _, _, view, at, _, numbers in self._parts:
            for buffer in itertools.islice(left, len(numbers)):
                buffer[:] = view[at : at + len(buffer)]
                at += len(buffer)
        self._over = True
        return 0  # its bytes are counted where they are read

    def drop(self) -> None:
        """It is not needed."""
        self._over = True

    def gone(self) -> bool:
        """Nothing uses its memory any more, which then goes back."""
        if self._batch._left or not self._over:
            return False
        self._ahead.spare.append(self._memory)
        return True


@dataclass
class _Piece:
    """A task of a `Staged`, in the form in which the reader takes it."""

    staged: Staged

    def fill(self, i: int, _buffers: list[memoryview]) -> int:
        self.staged.read(i)
        return 0


class Ahead:
    """Read-ahead for one engine. plan: (step, layer) -> experts to read while the layer before
    works. seen, what happened: (step, layer) -> (its experts, those missing, those resident
    before).
    """

    def __init__(self, engine: Engine) -> None:
        self.reader = engine.reader
        self.spare: list[mmap.mmap] = []
        self._used: list[Staged] = []
        self.start({})
        layer = engine.layers[0]
        self._size = sum(arena.slot_bytes + 2 * reads.PAGE for arena in layer._arenas)
        for layer in engine.layers:
            layer.__class__ = AheadLayer
            layer.ahead = self

    def start(self, plan: dict[tuple[int, int], list[int]]) -> None:
        """A stream begins."""
        self.plan, self.step = plan, -1
        self.seen: dict[tuple[int, int], tuple[list[int], list[int], set[int]]] = {}
        self.read: list[tuple[int, int]] = []  # (step, bytes) read ahead
        self.covered: list[tuple[int, int]] = []  # (step, misses that were staged)
        self._staged: dict[int, Staged] = {}

    def memory(self) -> mmap.mmap:
        """For one expert."""
        self._used = [staged for staged in self._used if not staged.gone()]
        return self.spare.pop() if self.spare else mmap.mmap(-1, self._size)

    def take(self, wanted: Sequence[int]) -> dict[int, Staged]:
        """Those that are staged for this layer; the others are called off."""
        staged, self._staged = self._staged, {}
        for expert in staged.keys() - set(wanted):
            staged.pop(expert).drop()
        return staged

    def stage(self, layer: Layer) -> None:
        """Begin to read what the plan says of a layer, behind whatever is being read."""
        for expert in self.plan.get((self.step, layer._number), ()):
            self._staged[expert] = Staged(self, layer, expert)
            self._used.append(self._staged[expert])


class AheadLayer(Layer):
    """A layer whose misses may be staged. Slots, policy and misses are the engine's own."""

    ahead: Ahead

    def _submit(self, wanted: list[int]) -> tuple[list[int], reads.Batch | None]:
        engine, ahead = self._engine, self.ahead
        if engine._prefill:
            return super()._submit(wanted)
        ahead.step += self._number == 0
        staged = ahead.take(wanted)
        before = set(self.table.slot_of)
        missing = self.table.request(wanted)
        ahead.seen[ahead.step, self._number] = (wanted, missing, before)
        ahead.covered.append((ahead.step, len(staged)))
        if not missing:
            batch = None
        else:
            slot_of = self.table.slot_of
            runs = {e: staged[e].runs if e in staged else self._runs[e] for e in missing}
            batch = engine.reader.submit([(runs[e], self._buffers[slot_of[e]]) for e in missing])
        if self._number + 1 < len(engine.layers):
            ahead.stage(engine.layers[self._number + 1])
        return missing, batch


def plan_for(
    seen: dict, precision: float, recall: float, rng: np.random.Generator, n: int, late: int
) -> dict[tuple[int, int], list[int]]:
    """Predictions of that quality, in random order: each miss of `seen` with probability recall,
    and at a steady rate experts that are neither resident nor needed.
    """
    cells = {key: cell for key, cell in seen.items() if key[1] > 0}
    mean = np.mean([len(missing) for (step, _), (_, missing, _) in cells.items() if step >= late])
    rate = recall * mean * (1 - precision) / precision
    plan = {}
    for key, (wanted, missing, before) in cells.items():
        right = [e for e in missing if rng.random() < recall]
        others = sorted(set(range(n)) - before - set(wanted))
        n_wrong = min(int(rate + rng.random()), len(others))
        plan[key] = rng.permutation([*right, *rng.choice(others, n_wrong, replace=False)]).tolist()
    return plan


def emulate_disk(bandwidth: float) -> None:
    """From now on reads take their share of a device of that many bytes a second."""
    original, lock, free = reads._File._pread, threading.Lock(), 0.0

    def pread(self, begin, buffers, needed, alignment):
        nonlocal free
        with lock:
            free = max(free, perf_counter()) + needed / bandwidth
            until = free
        original(self, begin, buffers, needed, alignment)
        sleep(max(0.0, until - perf_counter()))

    reads._File._pread = pread


def time_cases(args: argparse.Namespace) -> None:
    """Print the table."""
    import mlx.core as mx
    from mlx_lm.generate import stream_generate

    from moetap.capture import _mlx
    from moetap.capture.streaming.load import stream

    if args.disk:
        emulate_disk(args.disk * 1e9)
    loaded = stream(_mlx.open_model(str(args.folder)), args.slots, cold=True)
    engine = loaded.engine
    ahead = Ahead(engine)
    late = args.tokens // 3  # slots are empty at first
    prompt = [1]  # no prefill, which is not what is measured

    def run(plan: dict) -> dict[str, float]:
        engine.start(len(prompt), full_prefill=False)
        ahead.start(plan)
        times: list[float] = []
        # Sampled: greedy decoding of random weights falls into a loop, which hits too often.
        for _ in stream_generate(
            loaded.model,
            loaded.tokenizer,
            mx.array(prompt),
            max_tokens=args.tokens,
            sampler=lambda x: mx.random.categorical(x, key=mx.random.key(len(times))),
        ):
            times.append(perf_counter())
        io = engine.take(args.tokens)
        in_time = range(late, args.tokens)
        n_ahead = sum(n for step, n in ahead.read if step in in_time)
        return {
            "ms": float(np.diff(times)[late:].mean()) * 1e3,
            "wait": float(io.wait_s[late:].sum(axis=1).mean()) * 1e3,
            "MB": (int(io.read_bytes[late:].sum()) + n_ahead) / len(in_time) / 1e6,
            "misses": float(io.misses[late:].sum(axis=1).mean()),
            "covered": sum(n for step, n in ahead.covered if step in in_time) / len(in_time),
        }

    run({})
    seen = ahead.seen
    rng = np.random.default_rng(1)
    disk = f"emulated, {args.disk} GB/s" if args.disk else "as it is"
    print(f"C = {args.slots}, disk {disk}; per token: ms, of which waited for reads, MB read")
    print(
        "precision recall   base ms  wait     MB   ahead ms  wait     MB  covered   ratio (pairs)"
    )
    cases = [tuple(float(x) for x in case.split(":")) for case in args.cases.split(",")]
    rounds: list[list[dict[str, float]]] = []
    for number in range(args.pairs):
        # Which case follows the run without read-ahead changes from round to round.
        order = np.roll(range(len(cases)), number).tolist()
        results = {-1: run({})}
        for i in order:
            results[i] = run(plan_for(seen, *cases[i], rng, len(engine.layers[0]._rank), late))
            same = all(ahead.seen[key][1] == cell[1] for key, cell in seen.items())
            assert same, "read-ahead must not change what misses"
        rounds.append([results[i] for i in range(-1, len(cases))])
        print("ms:", *(f"{r['ms']:.0f}" for r in rounds[-1]), file=sys.stderr, flush=True)
    for i, (precision, recall) in enumerate(cases, 1):
        base, with_it = (
            {name: np.median([r[j][name] for r in rounds]) for name in rounds[0][0]} for j in (0, i)
        )
        ratios = [r[i]["ms"] / r[0]["ms"] for r in rounds]
        print(
            f"{precision:9.2f} {recall:6.2f}"
            + "".join(f"{r['ms']:10.0f} {r['wait']:5.1f} {r['MB']:6.1f} " for r in (base, with_it))
            + f"{with_it['covered'] / with_it['misses']:8.2f}   {np.median(ratios):5.3f} ("
            + " ".join(f"{r:.3f}" for r in ratios)
            + ")"
        )
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="speculative read-ahead of experts")
    verbs = parser.add_subparsers(dest="verb", required=True)
    quality = verbs.add_parser("predict", help="how good predictions are")
    quality.add_argument("trace", nargs="+")
    quality.add_argument("--model", help="folder of the model, if its router shall predict, too")
    timed = verbs.add_parser("time", help="what a prediction is worth")
    timed.add_argument("folder", type=Path)
    timed.add_argument("--slots", type=int, default=64)
    timed.add_argument("--cases", default="1:1", help="precision:recall,...")
    timed.add_argument("--pairs", type=int, default=3)
    timed.add_argument("--tokens", type=int, default=25)
    timed.add_argument("--disk", type=float, help="emulate a device of so many GB/s")
    args = parser.parse_args()
    if args.verb == "time":
        time_cases(args)
        return
    for path in args.trace:
        predict(path, args.model)


if __name__ == "__main__":
    main()
