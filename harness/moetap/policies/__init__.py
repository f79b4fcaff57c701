"""Cache policies: one file each, one protocol, third parties through entry points.

Knows the question that every policy answers: of the experts that are requested batch after batch,
which are not in a cache of so many slots? Refuses to know streams, lanes and statistics: a policy
gets the look-ups of one cache and says which of them missed.

The rules that all policies of this package share:

- A cache is empty at the start. One with room for everything never evicts.
- Look-ups come in batches. Hits are touched before misses get slots, and no member of the batch is
  evicted while it is served. A batch that is the set of a layer and step makes the look-ups
  *step-atomic*; batches of one expert, in row order, make them *sequential* (`LookUps.sequential`).
- Members are touched in the order in which they are listed, which is rising. So among experts last
  used in the same step, the lowest id leaves first.
- A set larger than the cache runs in ceil(U / C) passes. Members that are resident at the start of
  the step run in the first one and hit; all others miss, once each. The C members with the highest
  ids stay, as if the passes had gone through the ids in rising order. The passes beyond the first
  are forced and counted by `StepSets.extra_passes`: they depend on the sets alone.
  (`LookUps.keep` is another program's accounting: such a set stays whole, over the budget.)
- A cell (layer, step) that did not run requests nothing and leaves the cache as it is.
- A policy that can decide live (`Policy.online`) does so with the same code: batches of at most C
  experts, one at a time, evict and miss what `Policy.missed` says of the same batches. (Who has
  more than C to serve cuts them; a replay of the pieces then agrees.) An expert that is taken out
  from outside (`Online.forget`) is as if evicted, but teaches the policy nothing: ageing and hands
  that stand elsewhere stay.

A plug-in is an entry point of the group `moetap.policies` whose name is the policy's name and whose
value is a subclass of `Policy`. It may not shadow a built-in: a built-in's name always means the
built-in. `moetap.testing.check_policy` checks a policy against these rules.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from moetap.errors import MoetapError, UsageError

Ids: TypeAlias = NDArray[np.integer[Any]]

GROUP = "moetap.policies"

# Name -> module and class, in the order in which they are listed.
BUILT_IN = {
    "lru": ("lru", "LRU"),
    "lfu": ("lfu", "LFU"),
    "lfu-kept": ("lfu", "LFUKept"),
    "lfu-aging": ("lfu", "LFUAging"),
    "lfu-bypass": ("lfu", "LFUBypass"),
    "fifo": ("fifo", "FIFO"),
    "clock": ("clock", "Clock"),
    "sieve": ("sieve", "Sieve"),
    "slru": ("slru", "SLRU"),
    "static": ("static", "Static"),
    "static-preloaded": ("static", "StaticPreloaded"),
    "pinned": ("pinned", "Pinned"),
    "belady": ("belady", "Belady"),
    "belady-admit": ("belady_bypass", "BeladyAdmit"),
    "belady-bypass": ("belady_bypass", "BeladyBypass"),
}


@dataclass(frozen=True, eq=False)
class LookUps:
    """What one cache is asked for, batch after batch.

    Batch b asks for ids[starts[b] : starts[b + 1]], which differ from each other; it may be empty.

    starts: (batches + 1,) int64. ids: unsigned 16 or signed 32 bits. size: (n_objects,) int64, the
    part of the capacity that each object takes: 1 where it is counted in slots, else bytes.
    keep: a batch larger than the cache stays whole until the next one, instead of running in
    passes.
    """

    starts: NDArray[np.int64]
    ids: Ids
    size: NDArray[np.int64]
    keep: bool = False

    @property
    def sequential(self) -> LookUps:
        """The same, each look-up a batch of its own."""
        return replace(self, starts=np.arange(len(self.ids) + 1))

    def per_batch(self, missed: NDArray[np.bool_]) -> NDArray[np.int32]:
        """Number of look-ups marked in each batch."""
        total = np.zeros(len(missed) + 1, dtype=np.int64)
        np.cumsum(missed, out=total[1:])
        return np.diff(total[self.starts]).astype(np.int32)


@dataclass(frozen=True, eq=False)
class StepSets:
    """The distinct experts that each (layer, step) requests, as compressed rows.

    Cell c = layer * n_steps + step holds ids[starts[c] : starts[c + 1]], ascending.

    n_experts: (L,) int64. starts: (L * n_steps + 1,) int64. ids: uint16.
    ran: (L, n_steps) bool, False where the cell did not execute and so requests nothing.
    """

    n_steps: int
    n_experts: NDArray[np.int64]
    starts: NDArray[np.int64]
    ids: NDArray[np.uint16]
    ran: NDArray[np.bool_]

    @property
    def n_layers(self) -> int:
        """L, the number of MoE layers."""
        return len(self.n_experts)

    @property
    def requests(self) -> NDArray[np.int64]:
        """(steps, L) look-ups: distinct experts of the set, 0 where the cell did not run."""
        return np.diff(self.starts).reshape(self.n_layers, self.n_steps).T

    def extra_passes(self, capacity: int | NDArray[np.int64]) -> NDArray[np.int64]:
        """(steps, L) forced passes beyond the first, ceil(U / C) - 1 where U > C, else 0.

        capacity: slots, the same for all layers or (L,).
        """
        return np.asarray(np.maximum(-(-self.requests // capacity) - 1, 0))

    def layer(self, layer: int) -> LookUps:
        """Look-ups of one layer's own cache, in slots; batch b is step b."""
        starts = self.starts[layer * self.n_steps : (layer + 1) * self.n_steps + 1]
        size = np.ones(self.n_experts[layer], dtype=np.int64)
        return LookUps(starts - starts[0], self.ids[starts[0] : starts[-1]], size)

    def together(self, size: NDArray[np.int64]) -> LookUps:
        """Look-ups of one cache over (layer, expert); batch step * L + layer.

        size: (L,) what an expert of each layer takes. Object = experts of the layers before + id.
        """
        count = self.requests  # (steps, L)
        starts = np.zeros(count.size + 1, dtype=np.int64)
        np.cumsum(count.ravel(), out=starts[1:])
        first = np.cumsum(self.n_experts) - self.n_experts
        small = self.n_experts.sum() <= 2**16
        ids: Ids = (
            np.empty(len(self.ids), np.uint16) if small else np.empty(len(self.ids), np.int32)
        )
        for layer in range(self.n_layers):
            own = self.layer(layer)
            within = np.arange(len(own.ids)) - np.repeat(own.starts[:-1], count[:, layer])
            place = np.repeat(starts[layer : -1 : self.n_layers], count[:, layer]) + within
            ids[place] = own.ids + first[layer].astype(ids.dtype)
        return LookUps(starts, ids, np.repeat(size, self.n_experts))


class Online(ABC):
    """A cache whose policy decides live, empty at the start unless the policy is `preloaded`.

    Objects are numbers from 0; each takes one of the slots.
    """

    @abstractmethod
    def request(self, ids: Sequence[int]) -> list[int]:
        """Serve a batch; returns those that left, in any order, none of which is a member.

        ids: distinct, rising, at most as many as there are slots. All of them are held afterwards;
        those that were not held before missed.

        Raises:
            ValueError: ids are none of this.
        """

    @abstractmethod
    def __contains__(self, x: int) -> bool:
        """Object x is held."""

    @abstractmethod
    def forget(self, ids: Iterable[int]) -> None:
        """Objects that are not there after all leave, and miss next time. Others in `ids` that are
        not held are passed over.
        """

    @abstractmethod
    def clear(self) -> None:
        """Back to the start: contents, and all that was learned from requests."""


class Policy(ABC):
    """What a cache policy must have.

    name: in tables and on the command line.
    forced: every missing expert takes a slot, as it must where the layer computes with it there.
        A policy that is not (`belady-bypass`, `static`) needs room besides the cache.
    offline: it knows what will be requested, which no engine does.
    preloaded: what it holds is there before the first look-up, so that fewer than the first uses
        miss.
    fitted: it must be told which experts are hot (`fit`) before it can be used.
    """

    name: str
    forced: bool = True
    offline: bool = False
    preloaded: bool = False
    fitted: bool = False

    @abstractmethod
    def missed(self, look_ups: LookUps, capacity: int) -> NDArray[np.bool_]:
        """True for each look-up that missed, (len(look_ups.ids),), from an empty cache.

        capacity: at least 1, in the unit of `look_ups.size`, and no less than any size.
        """

    def online(self, n_objects: int, capacity: int) -> Online:
        """A cache of `capacity` slots, at least 1, that decides with this policy live.

        It misses what `missed` says of the same batches; what it returns shares no state with
        another.

        Raises:
            UsageError: the policy cannot; the message says what it needs.
        """
        needs = "an `online` of its own"
        if self.offline:
            needs = "to know what will be requested"
        elif not self.forced:
            needs = "room besides the slots"
        raise UsageError(f"policy {self.name} cannot decide online: it needs {needs}")

    def fit(self, counts: NDArray[np.int64]) -> Policy:
        """The policy for one cache, given how often each object is requested elsewhere.

        counts: (n_objects,), from streams other than the ones that are replayed.
        """
        return self

    def misses(self, sets: StepSets, capacities: NDArray[np.int64]) -> NDArray[np.int32]:
        """Misses per step and layer, step-atomic, with each of several capacities, (n_C, steps, L).

        capacities: (n_C,) slots per layer, in any order. They come together because some policies
        (those with inclusion) answer all of them in one pass. Hits are the rest:
        `sets.requests - misses`.
        """
        found = np.empty((len(capacities), sets.n_steps, sets.n_layers), dtype=np.int32)
        for layer in range(sets.n_layers):
            own = sets.layer(layer)
            for at, capacity in enumerate(capacities):
                found[at, :, layer] = own.per_batch(self.missed(own, int(capacity)))
        return found


def names() -> list[str]:
    """Names that `get` knows, built-ins first."""
    return [*BUILT_IN, *(point.name for point in _plug_ins() if point.name not in BUILT_IN)]


def shadowing() -> list[str]:
    """Plug-ins that are ignored because a built-in has their name, as "name (module)"."""
    return [f"{point.name} ({point.value})" for point in _plug_ins() if point.name in BUILT_IN]


def get(spec: str) -> Policy:
    """The policy of this name; "name:16" hands a number to it (`pinned` takes one).

    Raises:
        UsageError: there is none, or it takes no number.
        MoetapError: a plug-in cannot be loaded.
    """
    name, colon, option = spec.partition(":")
    kind = _find(name)
    if not colon:
        return kind()
    try:
        # Not every policy takes a number; TypeError says so.
        return kind(int(option))  # type: ignore[call-arg]
    except (TypeError, ValueError):
        raise UsageError(f"policy {spec!r}: {name} takes no such number") from None


def _find(name: str) -> type[Policy]:
    if name in BUILT_IN:
        module, kind = BUILT_IN[name]
        found: type[Policy] = getattr(import_module(f"moetap.policies.{module}"), kind)
        return found
    for point in _plug_ins():
        if point.name == name:
            return _load(point)
    raise UsageError(f"no policy is called {name!r}; there are {', '.join(names())}")


def _load(point: EntryPoint) -> type[Policy]:
    try:
        found = point.load()
    except Exception as error:  # whatever a stranger's module raises when it is imported
        raise MoetapError(
            f"policy {point.name} ({point.value}) cannot be loaded: {error!r:.200}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise MoetapError(f"policy {point.name} ({point.value}) is no subclass of Policy")
    return found


def _plug_ins() -> Iterator[EntryPoint]:
    yield from sorted(entry_points(group=GROUP), key=lambda point: point.name)
