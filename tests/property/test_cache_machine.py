"""The prefix cache against a naive oracle, under any order of what a scheduler may do: full attention alone, with windows, with states, with both.

Each set of components runs with a host tier and without, over page sizes and eviction policies; what was run is counted and printed at the end.
After every rule: all invariants, tags of all pages, the executor's view of the page table, and the oracle's tree, hits, priorities, counters.
ROOTLET_HYPOTHESIS_PROFILE=long: 2,000 examples of 60 steps for each set of components, half of them with a host tier.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fixtures.cache_bench import CacheBench, Seq
from fixtures.cache_oracle import Hold, space_of
from fixtures.fake_tier import FakeTier
from fixtures.host_oracle import HostHold, HostOracle
from rootlet.cache.eviction import POLICIES
from rootlet.cache.key import pack
from rootlet.cache.node import UnifiedTreeNode
from rootlet.cache.types import RadixKey
from rootlet.core.types import Namespace

LONG = os.environ.get("ROOTLET_HYPOTHESIS_PROFILE") == "long"

# pairs that a concatenation would confuse, and two spellings of "no namespace"
NAMESPACES = (Namespace(), Namespace("", None, ""), Namespace("a", "bc"), Namespace("ab", "c"), Namespace(None, "a", "bc"))
PAGES_PER_ROW = 10
PAGE_SIZES = (1, 2, 4, 16)
RUNS: Counter[tuple[str, int, str]] = Counter()  # (machine, page size, policy) -> examples
STEPS: Counter[str] = Counter()

picks = st.integers(0, 63)
tokens = st.lists(st.integers(0, 1), min_size=0, max_size=24)


class CacheMachine(RuleBasedStateMachine):
    parts: frozenset[str] = frozenset()
    with_host = False

    @initialize(
        page_size=st.sampled_from(PAGE_SIZES),
        policy=st.sampled_from(POLICIES.names()),
        num_pages=st.integers(8, 40),
        rows=st.integers(1, 6),
        window_len=st.integers(1, 24),
        num_window_pages=st.integers(4, 30),
        grid_pages=st.integers(1, 2),
        num_states=st.integers(2, 10),
        events=st.booleans(),
        tier=st.tuples(st.sampled_from((1, 1, 1, 2)), st.sampled_from((1, 1, 3)), st.integers(4, 40), st.integers(2, 30), st.integers(1, 8)),
        eager=st.booleans(),
        squeezed=st.booleans(),
        fill=st.lists(st.tuples(picks, picks, st.integers(1, 3), tokens, st.integers(0, 2)), max_size=6),
    )
    def start(
        self,
        page_size: int,
        policy: str,
        *,
        num_pages: int,
        rows: int,
        window_len: int,
        num_window_pages: int,
        grid_pages: int,
        num_states: int,
        events: bool,
        tier: tuple[int, int, int, int, int],
        eager: bool,
        squeezed: bool,
        fill: list[tuple[int, int, int, list[int], int]],
    ) -> None:
        self.policy = policy
        self.window_len = min(window_len, 3 * page_size) if "swa" in self.parts else None
        self.grid = grid_pages * page_size
        hits, min_load_len, *sizes = tier
        names = [name for name in ("full", "swa", "mamba") if name == "full" or name in self.parts]
        units = dict(zip(("full", "swa", "mamba"), sizes, strict=True)) if self.with_host else {}
        units = {name: units[name] for name in names if name in units}
        self.bench = CacheBench(
            page_size=page_size,
            num_pages=num_pages,
            rows=rows,
            pages_per_row=PAGES_PER_ROW,
            policy=policy,
            window=None if self.window_len is None else (self.window_len, num_window_pages),
            states=(self.grid, num_states) if "mamba" in self.parts else None,
            events=events,
            tier=FakeTier(units, write_through_hits=hits, min_load_len=min_load_len) if units else None,
        )
        self.cache = self.bench.cache
        self.oracle = HostOracle(
            page_size=page_size,
            policy=policy,
            window_len=self.window_len,
            states="mamba" in self.parts,
            units=units,
            hits=hits,
            min_load_len=min_load_len,
        )
        self.host_holds: list[HostHold] = []  # parallel to bench.host_locks
        self.waiting: list[Seq] = []
        self.prompts: list[list[int]] = [[]]
        self.released: list[Seq] = []
        self.holds: dict[int, Hold] = {}  # of live requests, by identity
        self.other_holds: list[Hold] = []  # parallel to bench.locks
        self.steps = 0
        self.eager = eager  # copies end as soon as a request has shared, instead of at some time
        for base, cut, stretch, more, space in fill:
            self.serve(base, cut, stretch, more, space, priority=0)
        if self.with_host and squeezed:
            self.all_copies_end()
            self.squeeze(0)

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
        self._admit(pick)

    def _admit(self, pick: int) -> bool:
        seq = self._waiting(pick)
        space, tokens = space_of(seq.namespace), tuple(seq.tokens[:-1])
        reach = self.oracle.reach(space, tokens)
        want = self.oracle.match(space, tokens)
        can = self.bench.rows.num_free > 0
        if can:
            hold = self.oracle.lock(space, tokens[:want])
            if not self._slot_for_oracle():
                can = False
                self._drop(hold)
        assert self.bench.admit(seq) == can
        if not can:
            return False
        self.holds[id(seq)] = hold
        assert seq.kv.kv_committed_len == want < len(seq.tokens)
        grid = self.grid if self.oracle.states else self.bench.page_size
        branch = reach // grid * grid
        assert seq.branch_at == (branch if branch > want and self.parts else None)
        self.waiting.remove(seq)
        return True

    @precondition(lambda self: self.bench.rows.num_free >= 2)
    @rule(pick=picks, share_first=st.booleans())
    def duplicates_in_one_step(self, pick: int, share_first: bool) -> None:
        """Two identical prompts are admitted before either is shared."""
        one = self._waiting(pick)
        two = self.bench.seq(one.tokens, one.namespace, one.priority)
        self.waiting.append(two)
        pair = (one, two) if share_first else (two, one)
        admitted = [self._admit(self.waiting.index(seq)) for seq in pair]
        if not all(admitted):
            return
        computed = [self._compute(seq, len(seq.tokens)) for seq in pair]
        if all(computed):
            for seq in reversed(pair):
                self._unfinished(seq)
            assert self.oracle.states or (
                self.bench.row_pages(one)[: len(one.tokens) // self.bench.page_size]
                == (self.bench.row_pages(two)[: len(one.tokens) // self.bench.page_size])
            )

    @rule(base=picks, cut=picks, stretch=st.integers(0, 3), more=tokens, space=picks, priority=st.integers(-1, 1))
    def serve(self, base: int, cut: int, stretch: int, more: list[int], space: int, *, priority: int) -> None:
        """A whole request at once, when there is room: fills the tree."""
        if not self.bench.rows.num_free:
            return
        self.submit(base, cut, stretch, more, space, priority=priority)
        if not self._admit(len(self.waiting) - 1):
            return
        seq, last = self.bench.live[-1], len(self.bench.live) - 1
        if self.oracle.states and self._compute(seq, len(seq.tokens) // self.grid * self.grid):
            self._unfinished(seq)
        if seq.kv.kv_committed_len == len(seq.tokens) or self._compute(seq, len(seq.tokens)):
            self.finish(last, 0, True)
        else:
            self.abort_or_retract(last, True)

    # ---- a running request ---------------------------------------------------------------------------------------------------------------

    @rule(pick=picks, count=st.integers(1, 24), share=st.booleans(), on_grid=st.booleans(), at_branch=st.booleans())
    def chunk(self, pick: int, count: int, share: bool, *, on_grid: bool, at_branch: bool) -> None:
        seq = self._running(pick)
        if seq is None:
            return
        length = min(len(seq.tokens), seq.kv.kv_committed_len + count)
        if on_grid:
            length = max(length // self.grid * self.grid, seq.kv.kv_committed_len)
        if at_branch and seq.branch_at is not None:
            length = max(seq.branch_at, seq.kv.kv_committed_len)
        if self._compute(seq, length) and share:
            self._unfinished(seq)

    @rule(pick=picks, token=st.integers(0, 1), count=st.integers(1, 5))
    def decode(self, pick: int, token: int, count: int) -> None:
        seq = self._running(pick)
        for _ in range(count if seq is not None else 0):
            if self._compute(seq, len(seq.tokens)) and len(seq.tokens) < PAGES_PER_ROW * self.bench.page_size:
                seq.tokens.append(token)

    @rule(pick=picks, count=st.integers(1, 5))
    def overrun(self, pick: int, count: int) -> None:
        """Overlap: positions past the committed ones are allocated and written, and may never count."""
        seq = self._running(pick)
        if seq is None:
            return
        length = min(seq.kv.kv_committed_len + count, PAGES_PER_ROW * self.bench.page_size)
        if self._reserve(seq, length):
            tokens = seq.tokens
            seq.tokens = tokens[: seq.kv.kv_committed_len] + [7] * count  # not what the request will go on with
            self.bench.write(seq, seq.kv.kv_committed_len, length)
            seq.tokens = tokens

    @rule(pick=picks)
    def unfinished(self, pick: int) -> None:
        seq = self._running(pick)
        if seq is None:
            return
        self._unfinished(seq, settle=False)  # a copy that ends may make room for one that found none
        before = self._state(), self.bench.row_pages(seq)
        aligned = self._shareable(seq, seq.kv.kv_committed_len, final=False)
        self.bench.unfinished(seq)  # idempotent
        assert (self._state(), self.bench.row_pages(seq)) == before
        if aligned > seq.kv.cache_protected_len or not self.oracle.states:
            inserted = seq.kv.cache_inserted_len
            self.oracle.insert(
                space_of(seq.namespace), seq.committed[:aligned], inserted=inserted, priority=seq.priority, protected=seq.kv.cache_protected_len
            )

    @precondition(lambda self: "mamba" in self.parts)
    @rule(pick=picks)
    def snapshot(self, pick: int) -> None:
        seq = self._running(pick)
        if seq is None:
            return
        at, have = seq.kv.kv_committed_len, list(seq.kv.snapshots)
        can = at % self.grid == 0 and at > seq.kv.cache_protected_len
        if can and not any(length == at for length, _ in have):
            can = self._slot_for_oracle()
            have = [*have, (at, -1)][-2:] if can else have
        assert self.cache.states.snapshot(seq.kv) == can
        assert [length for length, _ in seq.kv.snapshots] == [length for length, _ in have]

    @precondition(lambda self: "swa" in self.parts)
    @rule(pick=picks)
    def slide(self, pick: int) -> None:
        seq = self._running(pick)
        if seq is not None:
            want = self._released_len(seq, seq.kv.kv_committed_len)
            self.cache.window.slide(seq.kv, seq.kv.kv_committed_len)
            assert seq.kv.window_released_len == want

    @precondition(lambda self: "swa" in self.parts)
    @rule(pick=picks)
    def let_the_prefix_window_go(self, pick: int) -> None:
        seq = self._running(pick)
        if seq is None:
            return
        self.cache.window.let_go(seq.kv)
        if seq.kv.kv_committed_len - seq.kv.cache_protected_len >= self.window_len:
            hold = self.holds[id(seq)]
            hold.window_from, hold.state = None, False

    # ---- its end -------------------------------------------------------------------------------------------------------------------------

    @rule(pick=picks, beyond=st.integers(0, 4), at_prompt=st.booleans())
    def finish(self, pick: int, beyond: int, at_prompt: bool) -> None:
        """The stop may lie before what was committed."""
        seq = self._running(pick)
        if seq is None:
            return
        owned = max(seq.kv.kv_committed_len - beyond, seq.kv.cache_protected_len)
        space, inserted, protected = space_of(seq.namespace), seq.kv.cache_inserted_len, seq.kv.cache_protected_len
        if at_prompt and not self.parts:
            prompt = tuple(seq.tokens[: min(seq.prompt_len, owned)])
            self.oracle.insert(space, prompt, inserted=inserted, priority=seq.priority)
            inserted = max(inserted, len(prompt) // self.bench.page_size * self.bench.page_size)
        released = self._released_len(seq, owned) if owned >= self.bench.page_size else 0
        aligned = self._shareable(seq, owned, final=True)
        if aligned > protected or not self.oracle.states:
            tokens = tuple(seq.tokens[:aligned])
            self.oracle.insert(space, tokens, inserted=inserted, priority=seq.priority, protected=protected, released=released)
        self._unlock(seq)
        self.bench.finish(seq, owned=owned, prompt_len=seq.prompt_len if at_prompt else None)
        self.released.append(seq)
        if self.with_host and self.eager:
            self.all_copies_end()

    @rule(pick=picks, again=st.booleans())
    def abort_or_retract(self, pick: int, again: bool) -> None:
        seq = self._running(pick)
        if seq is None:
            return
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
        far = self.oracle.match_len(space_of(namespace), want, host=True)
        found = self.cache.match_prefix(key)
        assert found.host_hit_length == (far - self.oracle.match_len(space_of(namespace), want))
        assert found.device_prefix_len == self.oracle.match(space_of(namespace), want) == len(found.pages) * self.bench.page_size
        assert (self.cache.free_pages, self.cache.evictable_pages, self.cache.protected_pages) == sizes
        for i, page in enumerate(found.pages.tolist()):
            assert self.bench.content[page][1] == want[: (i + 1) * self.bench.page_size]
        for i, page in enumerate(() if found.window_pages is None else found.window_pages.tolist()):
            end = (i + 1) * self.bench.page_size
            assert page or end <= found.device_prefix_len - self.window_len, "a page of the window is missing"
            assert not page or self.bench.window_content[page][1] == want[:end]

    @rule(short=st.integers(-1, 12))
    def pressure(self, short: int) -> None:
        n = self.cache.free_pages + short
        free, can = self.cache.free_pages, n <= self.cache.free_pages + self.oracle.evictable
        assert self.cache.available_pages == self.cache.free_pages + self.oracle.evictable
        self._make_room(n)
        assert self.cache.ensure_pages(n) == can
        assert self.cache.free_pages == (max(free, n) if can else free)

    @precondition(lambda self: "swa" in self.parts)
    @rule(short=st.integers(-1, 12))
    def window_pressure(self, short: int) -> None:
        pool = self.bench.window.allocator.pages
        n, free = pool.num_free + short, pool.num_free
        can = n <= free + self.oracle.windows[0]
        if can and n > free:
            self.oracle.evict_windows(n - free)
        assert self.cache.keeper.ensure("swa", n) == can
        assert pool.num_free >= n if can else pool.num_free == free

    @precondition(lambda self: "mamba" in self.parts)
    @rule(short=st.integers(-1, 4))
    def state_pressure(self, short: int) -> None:
        pool = self.bench.states.allocator.pool
        n, free = pool.num_free + short, pool.num_free
        can = n <= free + self.oracle.slots[0]
        for _ in range(max(0, n - free) if can else 0):
            self.oracle.evict_state()
        assert self.cache.keeper.ensure("mamba", n) == can
        assert pool.num_free == (max(free, n) if can else free)

    @rule(pick=picks)
    def lock_any_node(self, pick: int) -> None:
        spans = [span for span in self.bench.spans() if span[3].full_pages is not None]
        if spans:
            namespace, _, path, node = spans[pick % len(spans)]
            self.bench.locks.append(self.cache.inc_lock_ref(node))
            self.other_holds.append(self.oracle.lock(space_of(namespace), path))

    @precondition(lambda self: self.bench.locks)
    @rule(pick=picks)
    def unlock_any_node(self, pick: int) -> None:
        at = pick % len(self.bench.locks)
        self._drop(self.other_holds.pop(at))
        self.cache.dec_lock_ref(self.bench.locks.pop(at))

    # ---- the host tier -------------------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.with_host and self.bench.tier.started)
    @rule(pick=picks, ok=st.sampled_from((True, True, True, False)))
    def a_copy_ends(self, pick: int, ok: bool) -> None:
        started = sorted(self.bench.tier.started)
        op = started[pick % len(started)] if pick % 3 == 0 else started[0]
        self.oracle.end(op, ok=ok)
        self.bench.acknowledge(op, ok=ok)

    @precondition(lambda self: self.with_host)
    @rule()
    def all_copies_end(self) -> None:
        for op in sorted(self.bench.tier.started):
            self.oracle.end(op, ok=True)
            self.bench.acknowledge(op)

    @precondition(lambda self: self.with_host)
    @rule(left=st.integers(0, 3))
    def squeeze(self, left: int) -> None:
        """Nearly everything that can leave the device does."""
        self.pressure(max(0, self.oracle.evictable - left))

    @precondition(lambda self: self.with_host)
    @rule(pick=picks, cut=st.integers(0, 3), more=tokens)
    def load_back(self, pick: int, cut: int, more: list[int]) -> None:
        want, namespace = self._on_the_host(pick)
        self._load_back((*want[: len(want) - cut], *more), namespace)

    @precondition(lambda self: self.with_host)
    @rule(pick=picks, token=st.integers(0, 1), fails=st.booleans())
    def load_back_for_a_request(self, pick: int, token: int, fails: bool) -> None:
        """What admission does: load, wait, match again."""
        want, namespace = self._on_the_host(pick)
        seq = self.bench.seq([*want[: (PAGES_PER_ROW - 2) * self.bench.page_size], token], namespace)
        self.waiting.append(seq)
        op = self._load_back(tuple(seq.tokens[:-1]), seq.namespace)
        if op is not None and pick % 4:
            self.oracle.end(op, ok=not fails)
            self.bench.acknowledge(op, ok=not fails)
        self._admit(self.waiting.index(seq))

    def _on_the_host(self, pick: int) -> tuple[tuple[int, ...], Namespace]:
        """A path that a match finds on the host and not on the device, if there is one."""
        spans = [span for span in self.bench.spans() if span[3].host is not None and not tiers(span[3])[0]]
        spans = spans or [span for span in self.bench.spans() if span[3].host is not None] or self.bench.spans()
        if not spans:
            return (), NAMESPACES[0]
        namespace, _, path, _ = spans[pick % len(spans)]
        return path, namespace

    def _load_back(self, want: tuple[int, ...], namespace: Namespace) -> int | None:
        space = space_of(namespace)
        length = self.oracle.match(space, want)
        far = self.oracle.match_len(space, want, host=True)
        callers = self.oracle.lock(space, want[:length])  # keeps a window, which is no room then
        expected = self._start_load(space, want[:far], far - length)
        self._drop(callers)
        assert self.bench.load_back(list(want), namespace) == expected
        return expected

    def _start_load(self, space: tuple[str, str, str], best: tuple[int, ...], length: int) -> int | None:
        """The oracle's side of `load_back`, decided by its own sums."""
        oracle = self.oracle
        wanted = oracle.wanted(space, best) if length >= max(1, oracle.min_load_len) else {}
        if not wanted:
            return None
        start = min(e.start for entries in wanted.values() for e in entries)
        path = [e for e in oracle._path(space, best) if e.start >= start]
        pending = [e.load for e in path if e.load is not None]
        if pending:
            return pending[0]
        near = max((len(e.path) for e in oracle._path(space, best) if e.device), default=0)
        hold, host_hold = oracle.lock(space, best[:near]), oracle.hold_host(space, best, start)
        sums = {
            "full": lambda: (oracle.evictable, oracle.protected),
            "swa": lambda: oracle.windows,
            "mamba": lambda: oracle.slots,
        }
        free = {name: self.cache.keeper.pools[name].num_free + sum(sums[name]()) for name in self.cache.keeper.pools}  # minus what is held then
        for name, entries in wanted.items():
            short = sum(oracle.size(e, name) for e in entries) - (free[name] - sum(sums[name]()))
            if short > sums[name]()[0]:
                self._drop(hold)
                oracle.drop_host_hold(host_hold)
                return None
            if name == "full":
                oracle.evict(short)
            elif name == "swa":
                oracle.evict_windows(short)
            else:
                for _ in range(short):
                    oracle.evict_state()
        return oracle.begin_load(space, best, wanted, hold, host_hold)

    @precondition(lambda self: self.with_host)
    @rule(pick=picks, short=st.integers(0, 8))
    def host_pressure(self, pick: int, short: int) -> None:
        names = sorted(self.oracle.units)
        name = names[pick % len(names)]
        n = self.bench.tier.pools[name].num_free + short
        assert self.cache.host.ensure(name, n) == self.oracle.make_host_room(name, n)

    @precondition(lambda self: self.with_host)
    @rule(pick=picks)
    def lock_any_host_copy(self, pick: int) -> None:
        spans = [span for span in self.bench.spans() if span[3].host is not None]
        if spans:
            namespace, start, path, node = spans[pick % len(spans)]
            self.bench.host_locks.append(self.cache.host.lock(node))
            self.host_holds.append(self.oracle.hold_host(space_of(namespace), path, start))

    @precondition(lambda self: self.bench.host_locks)
    @rule(pick=picks)
    def unlock_any_host_copy(self, pick: int) -> None:
        at = pick % len(self.bench.host_locks)
        self.oracle.drop_host_hold(self.host_holds.pop(at))
        self.cache.host.unlock(self.bench.host_locks.pop(at))

    @rule(often=st.integers(0, 7))
    def flush(self, often: int) -> None:
        if often:  # a flush that succeeds empties the tree: too dull to do each time
            return
        busy = self.bench.live or self.bench.locks or self.oracle.copies or self.host_holds
        idle, epoch, before = not busy, self.cache.epoch, self._state()
        assert self.cache.flush() == idle
        assert self.cache.epoch == epoch + idle
        if idle:
            self.oracle.entries.clear()
            self.oracle.free = dict(self.oracle.units)
            assert self.cache.free_pages == self.cache.allocator.num_pages
        else:
            assert self._state() == before

    @invariant()
    def laws_hold_and_the_oracle_agrees(self) -> None:
        if not hasattr(self, "bench"):
            return
        self.steps += 1
        self.bench.check()
        shape = {
            (space_of(namespace), start, path, node.hits, node.priority, node.swa_pages is not None, node.state_slot is not None, *tiers(node))
            for namespace, start, path, node in self.bench.spans()
        }
        assert shape == self.oracle.shape()
        assert {name: pool.num_free for name, pool in self.cache.keeper.host_pools.items()} == self.oracle.free
        for component, counted in zip(self.cache.core.others, self._other_counts(), strict=True):
            assert (component.evictable, component.protected) == counted
        assert self.cache.protected_pages == self.oracle.protected
        assert self.cache.evictable_pages == self.oracle.evictable

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        RUNS[type(self).__name__, self.bench.page_size, self.policy] += 1
        STEPS[type(self).__name__] += self.steps
        stats = self.cache.stats()
        for name in ("evicted_pages", "duplicate_pages", "adopted_pages", "matched_tokens", "epoch", *[f"{part}_evicted" for part in self.parts]):
            event(f"{name}: {'some' if stats[name] else 'none'}")
        for name in ("backed_up_pages", "loaded_back_pages", "demoted_pages", "copies_failed") if self.with_host else ():
            event(f"{name}: {'some' if stats[name] else 'none'}")
        event(f"steps: {self.steps // 10 * 10}+")
        while self.bench.live:
            self.abort_or_retract(0, False)
        while self.bench.locks:
            self.unlock_any_node(0)
        while self.bench.host_locks:
            self.unlock_any_host_copy(0)
        if self.with_host:
            self.all_copies_end()
        total = self.cache.allocator.num_pages
        assert self.cache.available_pages == total
        assert self.cache.ensure_pages(total)
        if self.with_host:
            assert self.cache.host.ensure("full", self.bench.tier.pools["full"].num_pages)
            assert all(pool.num_free == pool.num_pages for pool in self.bench.tier.pools.values())
        assert all(pool.num_free == pool.num_pages for pool in self.cache.keeper.pools.values())
        assert (self.cache.core.num_nodes, self.cache.core.roots, self.cache.free_pages) == (0, {}, total)
        self.bench.check()

    # ---- both sides at once --------------------------------------------------------------------------------------------------------------

    def _running(self, pick: int) -> Seq | None:
        """Any running request, made now if there is none, so that no rule depends on which others were drawn. None when it cannot be made."""
        if not self.bench.live and not self._admit(pick):
            return None
        return self.bench.live[pick % len(self.bench.live)]

    def _waiting(self, pick: int) -> Seq:
        if not self.waiting:
            self.submit(pick, pick, pick % 4, [pick % 2] * (pick % 24), pick // 16, priority=0)
        return self.waiting[pick % len(self.waiting)]

    def _reserve(self, seq: Seq, length: int) -> bool:
        """The oracle's side of `grow`, decided by its own sums."""
        size = self.bench.page_size
        need = max(0, -(-length // size) - -(-seq.kv.kv_allocated_len // size))
        can = need <= self.cache.free_pages + self.oracle.evictable
        if self.bench.window is not None:
            free = self.bench.window.allocator.pages.num_free
            can = can and need <= free + self.oracle.windows[0]
            if can and need:
                free += self.oracle.evict(need - self.cache.free_pages)
                self.oracle.evict_windows(need - free)
        elif can:
            self.oracle.evict(need - self.cache.free_pages)
        assert self.bench.reserve(seq, length) == can
        return can

    def _compute(self, seq: Seq, length: int) -> bool:
        return length > seq.kv.kv_committed_len and self._reserve(seq, length) and self.bench.compute(seq, length)

    def _make_room(self, n: int) -> None:
        """The oracle's side of `ensure_pages(n)`, decided by its own sums."""
        shortfall = n - self.cache.free_pages
        if 0 < shortfall <= self.oracle.evictable:
            self.oracle.evict(shortfall)

    def _slot_for_oracle(self) -> bool:
        """The oracle's side of taking one state slot."""
        if self.bench.states is None or self.bench.states.allocator.pool.num_free:
            return True
        if not self.oracle.slots[0]:
            return False
        self.oracle.evict_state()
        return True

    def _shareable(self, seq: Seq, length: int, *, final: bool) -> int:
        """How much of `length` tokens can be shared; takes the slot of a snapshot from the oracle where one is made."""
        aligned, at = length // self.bench.page_size * self.bench.page_size, seq.kv.kv_committed_len
        if not self.oracle.states or not aligned:
            return aligned
        lengths = [known for known, _ in seq.kv.snapshots]
        if seq.kv.cache_protected_len < at <= aligned and at % self.grid == 0 and (final or at in lengths or self._slot_for_oracle()):
            return at
        return max((known for known in lengths if known <= aligned), default=0)

    def _released_len(self, seq: Seq, length: int) -> int:
        """What `slide` must reach: whole pages of which no token is among the last W (rounded up to a page) before the last of the key."""
        if self.window_len is None:
            return 0
        size = self.bench.page_size
        known = [at for at, _ in seq.kv.snapshots]
        length = min(length, max(known)) if known else length
        kept = -(-self.window_len // size) * size
        target = 0
        while target + size <= length - 1 - kept:
            target += size
        return target if target > max(seq.kv.window_released_len, seq.kv.cache_protected_len) else seq.kv.window_released_len

    def _unfinished(self, seq: Seq, *, settle: bool = True) -> None:
        space, committed, protected = space_of(seq.namespace), seq.committed, seq.kv.cache_protected_len
        released = self._released_len(seq, len(committed)) if len(committed) >= self.bench.page_size else seq.kv.window_released_len
        aligned = self._shareable(seq, len(committed), final=False)
        if aligned > protected or not self.oracle.states:
            inserted = seq.kv.cache_inserted_len
            self.oracle.insert(space, committed[:aligned], inserted=inserted, priority=seq.priority, protected=protected, released=released)
        if aligned > protected:
            old, self.holds[id(seq)] = self.holds[id(seq)], self.oracle.lock(space, committed[:aligned])
            self._drop(old)
        self.bench.unfinished(seq)
        assert seq.kv.cache_protected_len == max(aligned, protected)
        assert seq.kv.window_released_len == released
        if settle and self.with_host and self.eager:
            self.all_copies_end()

    def _unlock(self, seq: Seq) -> None:
        self._drop(self.holds.pop(id(seq)))

    def _drop(self, hold: Hold) -> None:
        self.oracle.locks = [other for other in self.oracle.locks if other is not hold]

    def _other_counts(self) -> list[tuple[int, int]]:
        both = {"swa": self.oracle.windows, "mamba": self.oracle.slots}
        return [both[part] for part in ("swa", "mamba") if part in self.parts]

    def _state(self) -> tuple[object, ...]:
        nodes = [
            (node.seq, node.start, node.end, node.hits, node.pins, node.swa_refs, node.state_slot, node.host_refs, *tiers(node))
            for *_, node in self.bench.spans()
        ]
        pools = [pool.free_pages().tolist() for pool in self.cache.keeper.pools.values()]
        return nodes, pools, self.cache.free_pages, self.cache.evictable_pages, self.cache.protected_pages, self.cache.allocator.free_pages().tolist()


def tiers(node: UnifiedTreeNode) -> tuple[object, ...]:
    host = node.host or {}
    return node.full_pages is not None, "full" in host, "swa" in host, "mamba" in host, node.backup_op, node.load_op


class WindowMachine(CacheMachine):
    parts = frozenset({"swa"})


class StateMachine(CacheMachine):
    parts = frozenset({"mamba"})


class WholeMachine(CacheMachine):
    parts = frozenset({"swa", "mamba"})


def _test_case(machine: type[CacheMachine]) -> type:
    case = machine.TestCase
    case.settings = settings(
        max_examples=1000 if LONG else 120,
        stateful_step_count=60 if LONG else 50,
        deadline=None,
        database=None,
        derandomize=not LONG,
        suppress_health_check=list(HealthCheck),
    )
    return pytest.mark.timeout(7200 if LONG else 300)(case)


def _with_host(machine: type[CacheMachine]) -> type[CacheMachine]:
    return type("Host" + machine.__name__, (machine,), {"with_host": True})


PLAIN = (CacheMachine, WindowMachine, StateMachine, WholeMachine)
MACHINES = (*PLAIN, *map(_with_host, PLAIN))
(
    TestCacheMachine,
    TestWindowMachine,
    TestStateMachine,
    TestWholeMachine,
    TestHostMachine,
    TestHostWindowMachine,
    TestHostStateMachine,
    TestHostWholeMachine,
) = map(_test_case, MACHINES)


def _other_half(machine: str) -> str:
    return machine.removeprefix("Host") if machine.startswith("Host") else f"Host{machine}"


def test_every_page_size_and_policy_was_met_often_enough(capsys: pytest.CaptureFixture[str]) -> None:
    """Runs after the machines above, and counts what they did."""
    with capsys.disabled():
        for machine in sorted(STEPS):
            counts = {(size, policy): RUNS[machine, size, policy] for size in PAGE_SIZES for policy in POLICIES.names()}
            low, high = min(counts.values()), max(counts.values())
            print(f"\n{machine:18} {sum(counts.values()):6} examples {STEPS[machine]:8} steps, {low} to {high} of each page size and policy", end="")
            if LONG:  # hypothesis draws unevenly: what one half of a component set missed, the half with a host tier or without it met
                unmet = [pair for pair in counts if not counts[pair] and not RUNS[_other_half(machine), *pair]]
                assert not unmet, f"{machine}: {unmet}"
    met = {(size, policy) for _, size, policy in RUNS}
    assert len(STEPS) < len(MACHINES) or met == {(size, policy) for size in PAGE_SIZES for policy in POLICIES.names()}
