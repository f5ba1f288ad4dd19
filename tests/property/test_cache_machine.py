"""The prefix cache against a naive oracle, under any order of what a scheduler may do. cache.md 4.2, Full attention.

After every rule: all invariants, tags of all pages, the executor's view of the page table, and the oracle's tree, hits, priorities, counters.
ROOTLET_HYPOTHESIS_PROFILE=long: 2,000 examples of 60 steps.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fixtures.cache_bench import CacheBench, Seq
from fixtures.cache_oracle import CacheOracle, space_of
from rootlet.cache.eviction import POLICIES
from rootlet.cache.key import pack
from rootlet.cache.types import RadixKey
from rootlet.core.types import Namespace

LONG = os.environ.get("ROOTLET_HYPOTHESIS_PROFILE") == "long"

# pairs that a concatenation would confuse, and two spellings of "no namespace"
NAMESPACES = (Namespace(), Namespace("", None, ""), Namespace("a", "bc"), Namespace("ab", "c"), Namespace(None, "a", "bc"))
PAGES_PER_ROW = 10

picks = st.integers(0, 63)
tokens = st.lists(st.integers(0, 1), min_size=0, max_size=24)


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from((1, 2, 4, 8, 16)),
        policy=st.sampled_from(POLICIES.names()),
        num_pages=st.integers(8, 40),
        rows=st.integers(1, 6),
        fill=st.lists(st.tuples(picks, picks, st.integers(1, 3), tokens, st.integers(0, 2)), max_size=5),
    )
    def start(self, page_size: int, policy: str, num_pages: int, rows: int, fill: list[tuple[int, int, int, list[int], int]]) -> None:
        self.bench = CacheBench(page_size=page_size, num_pages=num_pages, rows=rows, pages_per_row=PAGES_PER_ROW, policy=policy)
        self.cache = self.bench.cache
        self.oracle = CacheOracle(page_size=page_size, policy=policy)
        self.waiting: list[Seq] = []
        self.prompts: list[list[int]] = [[]]
        self.released: list[Seq] = []
        self.steps = 0
        for base, cut, stretch, more, space in fill:
            self.serve(base, cut, stretch, more, space, priority=0)

    # ---- arrivals ------------------------------------------------------------------------------------------------------------------------

    @rule(base=picks, cut=picks, stretch=st.integers(0, 3), more=tokens, space=picks, priority=st.integers(-1, 1))
    def submit(self, base: int, cut: int, stretch: int, more: list[int], space: int, *, priority: int) -> None:
        old = self.prompts[base % len(self.prompts)]
        prompt = old[: cut % (len(old) + 1)] + [0] * (stretch * self.bench.page_size) + more
        prompt = prompt[: (PAGES_PER_ROW - 2) * self.bench.page_size] or [1]
        self.prompts.append(prompt)
        self.waiting.append(self.bench.seq(prompt, NAMESPACES[space % len(NAMESPACES)], priority))

    @rule(pick=picks)
    def admit(self, pick: int) -> None:
        seq = self._waiting(pick)
        space = space_of(seq.namespace)
        want = self.oracle.match(space, tuple(seq.tokens[:-1]))
        if not self.bench.admit(seq):
            return
        assert seq.kv.kv_committed_len == want
        assert want < len(seq.tokens)
        self.oracle.locks.append((space, tuple(seq.tokens[:want])))
        self.waiting.remove(seq)

    @precondition(lambda self: self.bench.rows.num_free >= 2)
    @rule(pick=picks, share_first=st.booleans())
    def duplicates_in_one_step(self, pick: int, share_first: bool) -> None:
        """Two identical prompts are admitted before either is shared."""
        one = self._waiting(pick)
        two = self.bench.seq(one.tokens, one.namespace, one.priority)
        self.waiting.append(two)
        pair = (one, two) if share_first else (two, one)
        for seq in pair:
            self.admit(self.waiting.index(seq))
        computed = [self._compute(seq, len(seq.tokens)) for seq in pair]
        if all(computed):
            for seq in reversed(pair):
                self._unfinished(seq)
            assert (
                self.bench.row_pages(one)[: len(one.tokens) // self.bench.page_size]
                == (self.bench.row_pages(two)[: len(one.tokens) // self.bench.page_size])
            )

    @rule(base=picks, cut=picks, stretch=st.integers(0, 3), more=tokens, space=picks, priority=st.integers(-1, 1))
    def serve(self, base: int, cut: int, stretch: int, more: list[int], space: int, *, priority: int) -> None:
        """A whole request at once, when there is room: fills the tree."""
        if not self.bench.rows.num_free:
            return
        self.submit(base, cut, stretch, more, space, priority=priority)
        self.admit(len(self.waiting) - 1)
        seq, last = self.bench.live[-1], len(self.bench.live) - 1
        if self._compute(seq, len(seq.tokens)):
            self.finish(last, 0, True)
        else:
            self.abort_or_retract(last, True)

    # ---- a running request ---------------------------------------------------------------------------------------------------------------

    @rule(pick=picks, count=st.integers(1, 24), share=st.booleans())
    def chunk(self, pick: int, count: int, share: bool) -> None:
        seq = self._running(pick)
        if self._compute(seq, min(len(seq.tokens), seq.kv.kv_committed_len + count)) and share:
            self._unfinished(seq)

    @rule(pick=picks, token=st.integers(0, 1), count=st.integers(1, 5))
    def decode(self, pick: int, token: int, count: int) -> None:
        seq = self._running(pick)
        for _ in range(count):
            if self._compute(seq, len(seq.tokens)) and len(seq.tokens) < PAGES_PER_ROW * self.bench.page_size:
                seq.tokens.append(token)

    @rule(pick=picks, count=st.integers(1, 5))
    def overrun(self, pick: int, count: int) -> None:
        """Overlap: positions past the committed ones are allocated and written, and may never count."""
        seq = self._running(pick)
        length = min(seq.kv.kv_committed_len + count, PAGES_PER_ROW * self.bench.page_size)
        if self._reserve(seq, length):
            tokens = seq.tokens
            seq.tokens = tokens[: seq.kv.kv_committed_len] + [7] * count  # not what the request will go on with
            self.bench.write(seq, seq.kv.kv_committed_len, length)
            seq.tokens = tokens

    @rule(pick=picks)
    def unfinished(self, pick: int) -> None:
        seq = self._running(pick)
        self._unfinished(seq)
        before = self._state(), self.bench.row_pages(seq)
        self.bench.unfinished(seq)  # idempotent
        assert (self._state(), self.bench.row_pages(seq)) == before
        self.oracle.insert(space_of(seq.namespace), seq.committed, inserted=seq.kv.cache_inserted_len, priority=seq.priority)

    # ---- its end -------------------------------------------------------------------------------------------------------------------------

    @rule(pick=picks, beyond=st.integers(0, 4), at_prompt=st.booleans())
    def finish(self, pick: int, beyond: int, at_prompt: bool) -> None:
        """The stop may lie before what was committed."""
        seq = self._running(pick)
        owned = max(seq.kv.kv_committed_len - beyond, seq.kv.cache_protected_len)
        space, inserted = space_of(seq.namespace), seq.kv.cache_inserted_len
        if at_prompt:
            prompt = tuple(seq.tokens[: min(seq.prompt_len, owned)])
            self.oracle.insert(space, prompt, inserted=inserted, priority=seq.priority)
            inserted = max(inserted, len(prompt) // self.bench.page_size * self.bench.page_size)
        self.oracle.insert(space, tuple(seq.tokens[:owned]), inserted=inserted, priority=seq.priority)
        self._unlock(seq)
        self.bench.finish(seq, owned=owned, prompt_len=seq.prompt_len if at_prompt else None)
        self.released.append(seq)

    @rule(pick=picks, again=st.booleans())
    def abort_or_retract(self, pick: int, again: bool) -> None:
        seq = self._running(pick)
        self._unlock(seq)
        self.bench.release(seq)
        (self.waiting if again else self.released).append(seq)

    @precondition(lambda self: self.released)
    @rule(pick=picks)
    def second_release_is_refused(self, pick: int) -> None:
        with pytest.raises(AssertionError, match="R5"):
            self.cache.release(self.released[pick % len(self.released)].kv)

    # ---- others --------------------------------------------------------------------------------------------------------------------------

    @rule(base=picks, cut=picks, more=tokens, space=picks)
    def probe_then_match(self, base: int, cut: int, more: list[int], space: int) -> None:
        old = self.prompts[base % len(self.prompts)]
        want, namespace = (*old[: cut % (len(old) + 1)], *more), NAMESPACES[space % len(NAMESPACES)]
        key, before = RadixKey(namespace, pack(want)), self._state()
        assert self.cache.probe(key) == self.oracle.match_len(space_of(namespace), want)
        assert self._state() == before
        sizes = self.cache.free_pages, self.cache.evictable_pages, self.cache.protected_pages
        found = self.cache.match_prefix(key)
        assert found.device_prefix_len == self.oracle.match(space_of(namespace), want) == len(found.pages) * self.bench.page_size
        assert (self.cache.free_pages, self.cache.evictable_pages, self.cache.protected_pages) == sizes
        for i, page in enumerate(found.pages.tolist()):
            assert self.bench.content[page][1] == want[: (i + 1) * self.bench.page_size]

    @rule(short=st.integers(-1, 12))
    def pressure(self, short: int) -> None:
        n = self.cache.free_pages + short
        free, can = self.cache.free_pages, n <= self.cache.free_pages + self.oracle.evictable
        assert self.cache.available_pages == self.cache.free_pages + self.oracle.evictable
        self._make_room(n)
        assert self.cache.ensure_pages(n) == can
        assert self.cache.free_pages == (max(free, n) if can else free)

    @rule(pick=picks)
    def lock_any_node(self, pick: int) -> None:
        spans = self.bench.spans()
        if spans:
            namespace, _, path, node = spans[pick % len(spans)]
            self.bench.locks.append(self.cache.inc_lock_ref(node))
            self.oracle.locks.append((space_of(namespace), path))

    @precondition(lambda self: self.bench.locks)
    @rule(pick=picks)
    def unlock_any_node(self, pick: int) -> None:
        lock = self.bench.locks.pop(pick % len(self.bench.locks))
        where = next((space_of(namespace), path) for namespace, _, path, node in self.bench.spans() if node is lock.node)
        self.oracle.locks.remove(where)
        self.cache.dec_lock_ref(lock)

    @rule(often=st.integers(0, 7))
    def flush(self, often: int) -> None:
        if often:  # a flush that succeeds empties the tree: too dull to do each time
            return
        idle, epoch, before = not self.bench.live and not self.bench.locks, self.cache.epoch, self._state()
        assert self.cache.flush() == idle
        assert self.cache.epoch == epoch + idle
        if idle:
            self.oracle.entries.clear()
            assert self.cache.free_pages == self.cache.allocator.num_pages
        else:
            assert self._state() == before

    @invariant()
    def laws_hold_and_the_oracle_agrees(self) -> None:
        if not hasattr(self, "bench"):
            return
        self.steps += 1
        self.bench.check()
        shape = {(space_of(namespace), start, path, node.hits, node.priority) for namespace, start, path, node in self.bench.spans()}
        assert shape == self.oracle.shape()
        assert self.cache.protected_pages == self.oracle.protected
        assert self.cache.evictable_pages == self.oracle.evictable

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        stats = self.cache.stats()
        for name in ("evicted_pages", "duplicate_pages", "adopted_pages", "matched_tokens", "epoch"):
            event(f"{name}: {'some' if stats[name] else 'none'}")
        event(f"steps: {self.steps // 10 * 10}+")
        while self.bench.live:
            self.abort_or_retract(0, False)
        while self.bench.locks:
            self.unlock_any_node(0)
        total = self.cache.allocator.num_pages
        assert self.cache.available_pages == total
        assert self.cache.ensure_pages(total)
        assert (self.cache.core.num_nodes, self.cache.core.roots, self.cache.free_pages) == (0, {}, total)
        self.bench.check()

    # ---- both sides at once --------------------------------------------------------------------------------------------------------------

    def _running(self, pick: int) -> Seq:
        """Any running request, made now if there is none, so that no rule depends on which others were drawn."""
        if not self.bench.live:
            self.admit(pick)
        return self.bench.live[pick % len(self.bench.live)]

    def _waiting(self, pick: int) -> Seq:
        if not self.waiting:
            self.submit(pick, pick, pick % 4, [pick % 2] * (pick % 24), pick // 16, priority=0)
        return self.waiting[pick % len(self.waiting)]

    def _reserve(self, seq: Seq, length: int) -> bool:
        size = self.bench.page_size
        self._make_room(max(0, -(-length // size) - -(-seq.kv.kv_allocated_len // size)))
        return self.bench.reserve(seq, length)

    def _compute(self, seq: Seq, length: int) -> bool:
        return length > seq.kv.kv_committed_len and self._reserve(seq, length) and self.bench.compute(seq, length)

    def _make_room(self, n: int) -> None:
        """The oracle's side of `ensure_pages(n)`, decided by its own sums."""
        shortfall = n - self.cache.free_pages
        if 0 < shortfall <= self.oracle.evictable:
            self.oracle.evict(shortfall)

    def _unfinished(self, seq: Seq) -> None:
        space, committed = space_of(seq.namespace), seq.committed
        protected = seq.kv.cache_protected_len
        self.oracle.insert(space, committed, inserted=seq.kv.cache_inserted_len, priority=seq.priority)
        aligned = len(committed) // self.bench.page_size * self.bench.page_size
        self.oracle.locks.remove((space, committed[:protected]))
        self.oracle.locks.append((space, committed[: max(aligned, protected)]))
        self.bench.unfinished(seq)
        assert seq.kv.cache_protected_len == aligned

    def _unlock(self, seq: Seq) -> None:
        self.oracle.locks.remove((space_of(seq.namespace), tuple(seq.tokens[: seq.kv.cache_protected_len])))

    def _state(self) -> tuple[object, ...]:
        nodes = [(node.seq, node.start, node.end, node.hits, node.pins) for *_, node in self.bench.spans()]
        return nodes, self.cache.free_pages, self.cache.evictable_pages, self.cache.protected_pages, self.cache.allocator.free_pages().tolist()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=2000 if LONG else 250,
    stateful_step_count=60 if LONG else 50,
    deadline=None,
    database=None,
    derandomize=not LONG,
    suppress_health_check=list(HealthCheck),
)
TestCacheMachine = pytest.mark.timeout(7200 if LONG else 300)(TestCacheMachine)
