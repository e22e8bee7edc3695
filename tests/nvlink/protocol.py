"""How ranks keep out of each other's way in the communication buffers: an executable model of the kernels.

Every warp is a coroutine that gives way before each access to memory that others see; a scheduler picks who is next.
Memory is sequentially consistent: fences are not modelled, order is. Rows are names, so that every reader can tell
whether it got the row it waited for, and every writer whether somebody still has to read what it overwrites.

Follows sync.cuh, items.cuh, dispatch.cu, combine.cu and route.cu; stamps and walks are those of the C++ headers.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field

from tests.nvlink import shared

Coroutine = Generator["Callable[[], object] | None", None, None]
"""Yields what it waits for; None where it only gives way."""


class Violation(AssertionError):
    """Something that the protocol must exclude."""


@dataclass(frozen=True)
class Rules:
    """The protocol; every change of a default breaks it."""

    lag: int | None = 1
    """An operation writes when all peers have announced the operation that many before it. None: at once."""
    granted: bool = True
    """Slots are written again only in a round that the receiver has granted."""
    drained_when_read: bool = True
    """Rows count as drained when they are read, not when they have arrived."""
    empty_rounds_granted: bool = True
    """The receiver of a dispatch grants rounds up to its first item at once."""
    flags_before_waiting: bool = True
    """Whoever must wait first raises the flags that it has put off."""
    home_in_rounds: bool = True
    """The final sums of a round begin when all before are done, also where they need no peer."""
    grants_itself_last: bool = True
    """The rank itself learns of a grant of combine after all peers."""


@dataclass(frozen=True)
class Operation:
    """One operation of all ranks. ``goes_to[rank][token]``: bit mask of ranks."""

    kind: str
    goes_to: tuple[tuple[int, ...], ...]
    capacity: int = 1
    segments: int = 1
    workers: int = 1

    @property
    def num_rounds(self) -> int:
        return max(1, -(-max(map(len, self.goes_to)) // self.capacity))

    def ranks_of(self, rank: int, token: int) -> list[int]:
        """Ranks of a token, ascending, without its own."""
        mask = self.goes_to[rank][token]
        return [to for to in range(len(self.goes_to)) if to != rank and mask >> to & 1]

    def items(self, rank: int) -> tuple[list[int], list[list[int]]]:
        """``item_token`` and ``item_starts`` of the plan on ``rank``."""
        item_token, starts = [], []
        for tokens in self.goes_to:
            bounds = [len(item_token)]
            for first in range(0, self.num_rounds * self.capacity, self.capacity):
                in_round = enumerate(tokens[first : first + self.capacity], first)
                item_token += [token for token, mask in in_round if mask >> rank & 1]
                bounds.append(len(item_token))
            starts.append(bounds)
        return item_token, starts


@dataclass(frozen=True)
class Case:
    """Consecutive operations of a group, and one order of events."""

    operations: tuple[Operation, ...]
    seed: int
    change: float
    """How often the scheduler changes its mind: at 1 it throws dice, at less it starves somebody for a while."""


class Buffer:
    """The communication buffer of one rank: a dictionary for each region, of flags or of cells."""

    def __init__(self) -> None:
        self.arrivals, self.credits, self.flags = Counter(), Counter(), Counter()
        self.routing: dict[tuple, tuple] = {}  # a word, known by its epoch
        self.staging: dict[tuple, tuple] = {}
        self.unread: set[tuple] = set()


@dataclass(eq=False)
class Thread:
    """A coroutine under way."""

    run: Coroutine
    priority: float
    waits_for: Callable[[], object] | None = None


@dataclass
class Group:
    """All ranks, and whose turn it is."""

    case: Case
    rules: Rules = field(default_factory=Rules)

    def __post_init__(self) -> None:
        self.random = random.Random(self.case.seed)
        self.size = len(self.case.operations[0].goes_to)
        self.buffers = [Buffer() for _ in range(self.size)]
        self.threads: list[Thread] = []

    def run(self) -> None:
        """Run all operations to their end.

        Raises:
            Violation: if the protocol failed.
        """
        for rank in range(self.size):
            self.spawn(self.rank(rank))
        while self.threads:
            self.threads.sort(key=lambda thread: thread.priority)
            for thread in self.threads:
                if thread.waits_for is None or thread.waits_for():
                    break
            else:
                raise Violation(f"deadlock of {len(self.threads)} warps")
            thread.waits_for = None
            try:
                thread.waits_for = next(thread.run)
            except StopIteration:
                self.threads.remove(thread)
            if self.random.random() < self.case.change:
                thread.priority = self.random.random()
        for rank, buffer in enumerate(self.buffers):
            if buffer.unread:
                raise Violation(f"rank {rank} never reads {buffer.unread}")

    def spawn(self, run: Coroutine) -> Thread:
        thread = Thread(run, self.random.random())
        self.threads.append(thread)
        return thread

    def rank(self, me: int) -> Coroutine:
        """The stream of one rank: kernels one after the other."""
        for epoch, operation in enumerate(self.case.operations, 1):
            kernel = Kernel(self, self.rules, me, epoch, operation)
            warps = [self.spawn(warp) for warp in kernel.warps()]
            yield lambda warps=warps: not any(warp in self.threads for warp in warps)


class Kernel:
    """One operation on one rank."""

    def __init__(self, group: Group, rules: Rules, me: int, epoch: int, operation: Operation):
        self.buffers, self.size, self.rules = group.buffers, group.size, rules
        self.me, self.epoch, self.op, self.parity = me, epoch, operation, epoch & 1
        self.mine = group.buffers[me]
        self.drained = Counter()
        self.item_token, self.starts = operation.items(me)

    def warps(self) -> Iterable[Coroutine]:
        """All that run at once."""
        workers = range(self.op.workers)
        yield self.announce()
        if self.op.kind == "route":
            yield self.publish()
            yield from (self.read_routing() for _ in workers)
        elif self.op.kind == "dispatch":
            yield from (self.send(worker) for worker in workers)
            yield from (self.receive(worker) for worker in workers)
        else:
            for worker in workers:
                partials, sums = deque(), deque()
                yield from (self.load_for_peers(worker, partials), self.sum_for_peers(partials))
                yield from (self.load_own(worker, sums), self.sum_own(sums))

    # ---- sync.cuh

    def announce(self) -> Coroutine:
        for peer in self.buffers:
            yield from self.store(peer.arrivals, self.me, self.epoch)

    def wait_for_credit(self) -> Coroutine:
        if self.rules.lag is None:
            return
        for peer in range(self.size):
            yield lambda peer=peer: self.mine.arrivals[peer] >= self.epoch - self.rules.lag

    def store(self, flags: Counter, key: object, value: int) -> Coroutine:
        yield
        if flags[key] >= value:
            raise Violation(f"flag {key} goes from {flags[key]} to {value}")
        flags[key] = value

    def stamp(self, token: int) -> int:
        return shared.load().stamp(self.epoch, token // self.op.capacity)

    def write(self, to: int, cell: int, row: object) -> Coroutine:
        yield
        key, buffer = (self.parity, self.me, cell), self.buffers[to]
        if key in buffer.unread:
            raise Violation(f"rank {self.me} overwrites {buffer.staging[key]} at rank {to} with {row}")
        buffer.staging[key] = (self.epoch, row)
        buffer.unread.add(key)

    def read(self, source: int, cell: int, row: object) -> Coroutine:
        yield
        key = (self.parity, source, cell)
        if self.mine.staging.get(key) != (self.epoch, row):
            raise Violation(f"rank {self.me} finds {self.mine.staging.get(key)} instead of {(self.epoch, row)}")
        self.mine.unread.remove(key)

    def flag(self, to: int, index: int, stamp: int) -> Coroutine:
        yield from self.store(self.buffers[to].flags, (self.parity, self.me, index), stamp)

    def flagged(self, source: int, index: int, stamp: int) -> bool:
        return self.mine.flags[self.parity, source, index] >= stamp

    # ---- route.cu

    def publish(self) -> Coroutine:
        yield from self.wait_for_credit()
        key = (self.parity, self.me)
        for peer in self.buffers:
            yield
            peer.routing[key] = (self.epoch, self.me)

    def read_routing(self) -> Coroutine:
        for source in range(self.size):
            yield lambda source=source: self.mine.routing.get((self.parity, source), (0,))[0] >= self.epoch
        for source in 2 * list(range(self.size)):  # to count and to place
            yield
            found = self.mine.routing[self.parity, source]
            if found != (self.epoch, source):
                raise Violation(f"rank {self.me} finds routing {found} of rank {source} in operation {self.epoch}")

    # ---- dispatch.cu, items.cuh

    def has_room(self, token: int, to: int) -> bool:
        return not self.rules.granted or self.mine.credits[to] >= self.stamp(token)

    def send(self, worker: int) -> Coroutine:
        yield from self.wait_for_credit()
        stored: deque[int] = deque()

        def raise_flags() -> Coroutine:
            while stored:
                token = stored.popleft()
                for to in self.op.ranks_of(self.me, token):
                    yield from self.flag(to, token % self.op.capacity, self.stamp(token))

        for token in range(worker, len(self.op.goes_to[self.me]), self.op.workers):
            ranks = self.op.ranks_of(self.me, token)
            if token >= self.op.capacity and ranks:
                yield
                if not all(self.has_room(token, to) for to in ranks):
                    if self.rules.flags_before_waiting:
                        yield from raise_flags()
                    for to in ranks:
                        yield lambda token=token, to=to: self.has_room(token, to)
            for i in range(len(ranks)):
                yield from self.write(ranks[(i + token) % len(ranks)], token % self.op.capacity, token)
            stored.append(token)
            if len(stored) == 3:
                yield from raise_flags()
        yield from raise_flags()

    def next_round_with_items(self, source: int, round_: int) -> int:
        bounds = self.starts[source]
        while round_ < self.op.num_rounds and bounds[round_] == bounds[round_ + 1]:
            round_ += 1
        return round_

    def grant(self, to: int, round_: int) -> Coroutine:
        yield from self.store(self.buffers[to].credits, self.me, shared.load().stamp(self.epoch, round_))

    def note_drained(self, source: int, token: int) -> Coroutine:
        if self.op.num_rounds == 1:
            return
        yield
        self.drained[source] += 1
        round_ = token // self.op.capacity
        if self.drained[source] == self.starts[source][round_ + 1] - self.starts[source][0]:
            yield from self.grant(source, self.next_round_with_items(source, round_ + 1))

    def receive(self, worker: int) -> Coroutine:
        if worker == 0 and self.op.num_rounds > 1 and self.rules.empty_rounds_granted:
            for source in range(self.size):
                round_ = self.next_round_with_items(source, 0)
                if round_ > 0 and source != self.me:
                    yield from self.grant(source, round_)
        loads: deque[tuple[int, int]] = deque()

        def finish_load() -> Coroutine:
            source, token = loads.popleft()
            yield from self.read(source, token % self.op.capacity, token)
            if self.rules.drained_when_read:
                yield from self.note_drained(source, token)

        for source, item, _ in shared.walk(self.starts, self.me, worker, self.op.workers, 1):
            token = self.item_token[item]
            entry = (source, token % self.op.capacity, self.stamp(token))
            yield
            while loads and not self.flagged(*entry):
                yield from finish_load()
            yield lambda entry=entry: self.flagged(*entry)
            loads.append((source, token))
            if not self.rules.drained_when_read:
                yield from self.note_drained(source, token)
            if len(loads) == 3:
                yield from finish_load()
        while loads:
            yield from finish_load()

    # ---- combine.cu

    def hand_over(self, queue: deque, entry: tuple) -> Coroutine:
        yield lambda: len(queue) < 3
        queue.append(entry)

    def load_for_peers(self, worker: int, queue: deque) -> Coroutine:
        yield from self.wait_for_credit()
        for home, item, segment in shared.walk(self.starts, self.me, worker, self.op.workers, self.op.segments):
            token = self.item_token[item]
            if token >= self.op.capacity:
                yield lambda token=token, home=home: self.has_room(token, home)
            yield from self.hand_over(queue, (home, token, segment))
        yield from self.hand_over(queue, ())

    def sum_for_peers(self, queue: deque) -> Coroutine:
        written: list[tuple[int, int, int]] = []

        def raise_flags() -> Coroutine:
            while written:
                yield from self.flag(*written.pop(0))

        while True:
            if not queue and self.rules.flags_before_waiting:
                yield from raise_flags()
            yield lambda: queue
            entry = queue.popleft()
            if not entry:
                break
            home, token, segment = entry
            cell = token % self.op.capacity * self.op.segments + segment
            yield from self.write(home, cell, (token, segment))
            written.append((home, cell, self.stamp(token)))
            if len(written) == 3:
                yield from raise_flags()
        yield from raise_flags()

    def load_own(self, worker: int, queue: deque) -> Coroutine:
        yield from self.wait_for_credit()
        for unit in range(worker, len(self.op.goes_to[self.me]) * self.op.segments, self.op.workers):
            token, segment = divmod(unit, self.op.segments)
            if self.rules.home_in_rounds and token >= self.op.capacity:
                yield lambda token=token: self.has_room(token, self.me)
            for source in self.op.ranks_of(self.me, token):
                cell = token % self.op.capacity * self.op.segments + segment
                entry = (source, cell, self.stamp(token))
                yield lambda entry=entry: self.flagged(*entry)
                yield from self.hand_over(queue, (source, cell, (token, segment)))
            yield from self.hand_over(queue, (token,))
        yield from self.hand_over(queue, ())

    def sum_own(self, queue: deque) -> Coroutine:
        while True:
            yield lambda: queue
            entry = queue.popleft()
            if not entry:
                return
            if len(entry) == 3:
                yield from self.read(*entry)
            elif self.op.num_rounds > 1:
                yield from self.note_summed(*entry)

    def note_summed(self, token: int) -> Coroutine:
        yield
        self.drained[0] += 1
        round_ = token // self.op.capacity
        if self.drained[0] != (round_ + 1) * self.op.capacity * self.op.segments:
            return
        for step in range(self.size):
            first = self.me + 1 if self.rules.grants_itself_last else 0
            yield from self.grant((first + step) % self.size, round_ + 1)
