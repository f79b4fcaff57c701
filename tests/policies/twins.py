"""Every policy once more in plain Python, written from its description, one object at a time."""

from __future__ import annotations

from collections import Counter, OrderedDict
from functools import lru_cache
from math import inf

import numpy as np

from moetap.policies import LookUps


def look_ups(batches, n_objects, size=None, keep=False) -> LookUps:
    """From lists of ids."""
    return LookUps(
        np.cumsum([0, *map(len, batches)]),
        np.array([x for batch in batches for x in batch], dtype=np.uint16),
        np.array(size if size is not None else [1] * n_objects, dtype=np.int64),
        keep,
    )


def run(kind, batches, capacity, size, keep=False, counts=None) -> list[bool]:
    """Which look-ups miss, in order."""
    cache = kind(batches, capacity, size, counts)
    found = []
    for now, batch in enumerate(batches):
        cache.now = now
        hits = [x for x in batch if x in cache.held()]
        found += [x not in hits for x in batch]
        if batch:
            cache.seen(batch)
            serve(cache, batch, hits, capacity, size, keep)
    return found


def serve(cache, batch, hits, capacity, size, keep):
    def total(xs):
        return sum(size[x] for x in xs)

    if not cache.forced:
        cache.retain(batch, hits)
        return
    missing = [x for x in batch if x not in hits]
    while total(cache.held()) + total(missing) > capacity:
        others = [x for x in cache.held() if x not in batch]
        if not others:
            break
        cache.evict(set(batch))
    stay = list(batch)
    if not keep:
        while total(stay) > capacity:
            gone = stay.pop(0)
            if gone in cache.held():
                cache.remove(gone)
            cache.passed(gone)
    for x in stay:
        cache.hit(x) if x in hits else cache.load(x)
    cache.done()


class Base:
    forced = True

    def __init__(self, batches, capacity, size, counts):
        self.batches, self.capacity, self.size, self.counts = batches, capacity, size, counts
        self.now = 0
        self.order = OrderedDict()  # oldest first

    def held(self):
        return list(self.order)

    def seen(self, batch):
        pass

    def remove(self, x):
        del self.order[x]

    def passed(self, x):
        pass

    def evict(self, members):
        self.remove(next(x for x in self.order if x not in members))

    def load(self, x):
        self.order[x] = None

    def hit(self, x):
        pass

    def done(self):
        pass


class FIFO(Base):
    pass


class LRU(Base):
    def hit(self, x):
        self.order.move_to_end(x)


class Clock(Base):
    def load(self, x):
        self.order[x] = False

    def seen(self, batch):
        for x in batch:
            if x in self.order:
                self.order[x] = True

    def evict(self, members):
        while True:
            x = next(x for x in self.order if x not in members)
            if not self.order[x]:
                return self.remove(x)
            self.order[x] = False
            self.order.move_to_end(x)


class Sieve(Base):
    def __init__(self, *args):
        super().__init__(*args)
        self.queue, self.bits, self.hand = [], {}, None  # queue: oldest first

    def held(self):
        return list(self.queue)

    def seen(self, batch):
        for x in batch:
            if x in self.queue:
                self.bits[x] = True

    def evict(self, members):
        while True:
            if self.hand is None:
                self.hand = self.queue[0]
            x = self.hand
            if x not in members and not self.bits[x]:
                return self.remove(x)
            if x not in members:
                self.bits[x] = False
            self.hand = self.newer(x)

    def newer(self, x):
        at = self.queue.index(x) + 1
        return self.queue[at] if at < len(self.queue) else None

    def remove(self, x):
        if self.hand == x:
            self.hand = self.newer(x)
        self.queue.remove(x)

    def load(self, x):
        self.queue.append(x)
        self.bits[x] = False


class SLRU(Base):
    def __init__(self, *args):
        super().__init__(*args)
        self.protected = OrderedDict()

    def held(self):
        return [*self.order, *self.protected]

    def remove(self, x):
        (self.order if x in self.order else self.protected).pop(x)

    def evict(self, members):
        self.remove(next(x for x in self.held() if x not in members))

    def hit(self, x):
        self.remove(x)
        self.protected[x] = None

    def done(self):
        while sum(self.size[x] for x in self.protected) > self.capacity * 4 // 5:
            x, _ = self.protected.popitem(last=False)
            self.order[x] = None


class LFU(Base):
    kept = aging = False

    def __init__(self, *args):
        super().__init__(*args)
        self.count, self.value, self.last, self.clock, self.age = Counter(), {}, {}, 0, 0

    def seen(self, batch):
        self.count.update(batch)

    def evict(self, members):
        others = [x for x in self.order if x not in members]
        x = min(others, key=lambda x: (self.value[x], self.last[x]))
        if self.aging:
            self.age = self.value[x]
        self.remove(x)
        self.passed(x)

    def passed(self, x):
        if not self.kept:
            self.count[x] = 0

    def load(self, x):
        self.order[x] = None
        self.hit(x)

    def hit(self, x):
        self.clock += 1
        self.last[x] = self.clock
        self.value[x] = self.count[x] + self.age


class LFUKept(LFU):
    kept = True


class LFUAging(LFU):
    aging = True


class Retain(Base):
    """After each batch the most valuable of residents and members stay."""

    forced = False

    def retain(self, batch, hits):
        self.note(batch)
        order = sorted({*self.order, *batch}, key=self.worth, reverse=True)
        while sum(self.size[x] for x in order) > self.capacity:
            order.pop()
        self.order = OrderedDict.fromkeys(order)

    def note(self, batch):
        pass


class LFUBypass(Retain):
    def __init__(self, *args):
        super().__init__(*args)
        self.count, self.last, self.clock = Counter(), {}, 0

    def note(self, batch):
        self.count.update(batch)
        for x in batch:
            self.clock += 1
            self.last[x] = self.clock

    def worth(self, x):
        return self.count[x], self.last[x]


def next_use(batches, now, x):
    return next((t for t in range(now + 1, len(batches)) if x in batches[t]), inf)


class BeladyBypass(Retain):
    def retain(self, batch, hits):
        super().retain(batch, hits)
        self.order = OrderedDict.fromkeys(x for x in self.order if self.worth(x)[0] > -inf)

    def worth(self, x):
        return -next_use(self.batches, self.now, x), -x


class BeladyAdmit(BeladyBypass):
    def retain(self, batch, hits):
        loads = [x for x in batch if x not in hits]
        while sum(self.size[x] for x in loads) > self.capacity:
            loads.pop(0)
        others = [x for x in self.order if x not in loads and self.worth(x)[0] > -inf]
        others.sort(key=self.worth, reverse=True)
        while sum(self.size[x] for x in loads + others) > self.capacity:
            others.pop()
        self.order = OrderedDict.fromkeys(loads + others)


class Belady(Base):
    def evict(self, members):
        others = [x for x in self.order if x not in members]
        self.remove(max(others, key=lambda x: next_use(self.batches, self.now, x)))


def hot(counts, size, room, most=None):
    ranked = sorted(range(len(counts)), key=lambda x: (-counts[x], x))
    chosen = set()
    for x in ranked[:most]:
        if size[x] <= room:
            chosen.add(x)
            room -= size[x]
    return chosen


class Static(Retain):
    def retain(self, batch, hits):
        for x in batch:
            if x in hot(self.counts, self.size, self.capacity):
                self.order[x] = None


class StaticPreloaded(Static):
    def __init__(self, *args):
        super().__init__(*args)
        self.order = OrderedDict.fromkeys(hot(self.counts, self.size, self.capacity))


class Pinned(LRU):
    def __init__(self, *args):
        super().__init__(*args)
        self.pinned = hot(self.counts, self.size, self.capacity // 2)

    def evict(self, members):
        others = [x for x in self.order if x not in members]
        self.remove(next((x for x in others if x not in self.pinned), others[0]))


TWINS = {
    "lru": LRU,
    "lfu": LFU,
    "lfu-kept": LFUKept,
    "lfu-aging": LFUAging,
    "lfu-bypass": LFUBypass,
    "fifo": FIFO,
    "clock": Clock,
    "sieve": Sieve,
    "slru": SLRU,
    "static": Static,
    "static-preloaded": StaticPreloaded,
    "pinned": Pinned,
    "belady": Belady,
    "belady-admit": BeladyAdmit,
    "belady-bypass": BeladyBypass,
}


def fewest_misses(batches, capacity) -> int:
    """The least that any policy can miss that loads what it misses and nothing else, and holds a
    batch's members while it runs: every choice of what leaves is tried."""
    batches = [frozenset(batch) for batch in batches]

    @lru_cache(None)
    def best(at, held):
        if at == len(batches):
            return 0
        batch = batches[at]
        if len(batch) > capacity:
            after = [frozenset(sorted(batch)[-capacity:])]
        else:
            after = choices(held - batch, capacity - len(batch), batch)
        return len(batch - held) + min(best(at + 1, state) for state in after)

    def choices(others, room, batch):
        from itertools import combinations

        return [batch | set(some) for some in combinations(others, min(room, len(others)))]

    return best(0, frozenset())
