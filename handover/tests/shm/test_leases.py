"""Leases under any order of events: a state machine over real files and locks, with its own clock."""

import os
from contextlib import ExitStack
from functools import partial

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from handover.tests.support import Clock, bytes_below, crash_pool, outcome, shared_root, trim
from mmrouter_handover.shm import PlainFiles, Pool, Reader, ledger, reclaim
from mmrouter_handover.shm.slot_format import slot_bytes
from mmrouter_handover.shm.writer_folder import file_bytes

KIB = 1 << 10
LIMIT = 3 * slot_bytes(1) + slot_bytes(100 * KIB)
SIZES = (1, 5000, 100 * KIB)


class Leases(RuleBasedStateMachine):
    """Two writers that die and restart, each of slots and of plain files, two readers, and a janitor.

    Each payload contains its own number, so reading a reused slot yields another number.
    """

    handles = Bundle("handles")
    drafts = Bundle("drafts")
    views = Bundle("views")
    plain_files = Bundle("plain_files")

    def __init__(self):
        super().__init__()
        self.stack = ExitStack()
        self.root = self.stack.enter_context(shared_root())
        self.clock = Clock()
        self.count = 0
        self.pools = [self.pool(), self.pool()]
        self.plains = [self.plain(), self.plain()]
        self.plain_promises = {}
        """Plain files that must exist: path to payload, deadline, rights (which end with their writer), and writer."""
        self.dead = set()
        self.readers = [Reader(self.root), Reader(self.root, mapped_bytes=1)]
        self.all_handed_over = []
        self.unpublished = []
        self.over = set()
        """Handles that must not be readable, by path and generation."""
        self.promised = {}
        """Handles that must be readable: path and generation to deadline."""
        self.held = {}
        """Open views and their expected payloads."""

    def pool(self):
        return Pool(self.root, "writer", limit_bytes=LIMIT, high_water=1.0, now=self.clock)

    def plain(self):
        return PlainFiles(self.root, "writer", LIMIT, high_water=1.0, now=self.clock)

    def payload(self, size):
        self.count += 1
        return (self.count.to_bytes(4, "little") * (size // 4 + 1))[:size]

    def teardown(self):
        for view in self.held:
            view.release()
        for reader in self.readers:
            reader.close()
        for which in (0, 1):
            self.kill_a_writer(which)
        for writer in (*self.pools, *self.plains):
            writer.abandon()
        self.clock.now += 3600
        reclaim(self.root, self.clock.now)
        left = bytes_below(self.root), os.listdir(self.root)
        self.stack.close()
        assert left == (0, [])

    def hand_over(self, which, size, seconds):
        payload = self.payload(size)
        lease = self.pools[which].put(payload, f"payload {self.count}", seconds=seconds)
        key = (lease.handle.path, lease.handle.generation)
        # The slot has no reader and no other lease that still holds.
        assert all(view.handle.path != lease.handle.path for view in self.held)
        for path, generation in list(self.promised):
            if path == lease.handle.path:
                assert self.promised.pop((path, generation)) <= self.clock.now
        for handle, *_ in self.handed_over_at(lease.handle.path):
            self.over.add((handle.path, handle.generation))
        self.over.discard(key)
        self.promised[key] = self.clock.now + seconds
        return lease, payload

    def handed_over_at(self, path):
        return [item for item in self.all_handed_over if item[0].path == path]

    @rule(target=handles, which=st.integers(0, 1), size=st.sampled_from(SIZES), seconds=st.sampled_from((1.0, 10.0)))
    def put(self, which, size, seconds):
        result, why = outcome(lambda: self.hand_over(which, size, seconds))
        if result is None:
            assert why == "full"
            assert self.pools[which].lent_bytes + slot_bytes(size) > LIMIT
            return multiple()
        lease, payload = result
        item = (lease.handle, payload, lease, self.pools[which])
        self.all_handed_over.append(item)
        return item

    @rule(target=views, which=st.integers(0, 1), size=st.sampled_from(SIZES), cancelled=st.booleans())
    def put_and_hold(self, which, size, cancelled):
        """A slot that is read while its lease ends: the main property, rarely drawn step by step."""
        item = self.put(which, size, 1.0)
        if not isinstance(item, tuple):
            return multiple()
        view = self.open(item, which)
        if cancelled:
            self.cancel(item)
        return view

    @rule(target=drafts, which=st.integers(0, 1), size=st.sampled_from(SIZES))
    def begin(self, which, size):
        lease, why = outcome(lambda: self.pools[which].lease(size))
        if lease is None:
            assert why == "full"
            return multiple()
        for handle, *_ in self.handed_over_at(f"{self.pools[which].name}/{lease.slot.name}"):
            key = (handle.path, handle.generation)
            assert self.promised.pop(key, 0.0) <= self.clock.now
            assert all(view.handle.path != handle.path for view in self.held)
            self.over.add(key)
        self.unpublished.append((self.pools[which], lease))
        return lease

    @rule(draft=drafts)
    def release_a_draft(self, draft):
        draft.release()

    @rule(target=views, item=handles, which=st.integers(0, 1))
    def open(self, item, which):
        handle, payload, _, _ = item
        key = (handle.path, handle.generation)
        view, why = outcome(lambda: self.readers[which].open(handle))
        if view is None:
            assert why in ("stale", "gone")
            assert self.promised.get(key, 0.0) <= self.clock.now
            return multiple()
        assert key not in self.over
        assert bytes(view.data) == payload
        self.held[view] = payload
        return view

    @rule(which=st.integers(0, 1))
    def try_every_handle_that_there_ever_was(self, which):
        for handle, payload, *_ in self.all_handed_over:
            view, why = outcome(partial(self.readers[which].open, handle))
            if view is None:
                assert why in ("stale", "gone")
                assert self.promised.get((handle.path, handle.generation), 0.0) <= self.clock.now
            else:
                assert (handle.path, handle.generation) not in self.over
                assert bytes(view.data) == payload
                view.release(acknowledge=False)

    @rule(view=views, acknowledge=st.booleans())
    def release_a_view(self, view, acknowledge):
        if view in self.held:
            view.release(acknowledge=acknowledge)
            del self.held[view]
            if acknowledge:
                self.promised.pop((view.handle.path, view.handle.generation), None)

    @rule(item=handles)
    def cancel(self, item):
        handle, _, lease, pool = item
        lease.release()
        if pool not in self.dead:
            self.promised.pop((handle.path, handle.generation), None)

    @rule(
        target=plain_files,
        which=st.integers(0, 1),
        size=st.sampled_from(SIZES),
        seconds=st.sampled_from((1.0, 10.0)),
        key=st.sampled_from(("", "a", "b")),
    )
    def put_a_plain_file(self, which, size, seconds, key):
        plains = self.plains[which]
        payload = key.encode() * size if key else self.payload(size)
        file, why = outcome(lambda: plains.put(payload, f".{size}", key=key, seconds=seconds))
        if file is None:
            assert why == "full"
            assert plains.bytes + file_bytes(size) > LIMIT
            return multiple()
        _, deadline, rights, _ = self.plain_promises.get(file.path, (payload, 0.0, set(), plains))
        until = max(deadline, self.clock.now + seconds)
        self.plain_promises[file.path] = (payload, until, rights | {file}, plains)
        return file

    @rule(file=plain_files)
    def release_a_plain_file(self, file):
        file.release()
        file.release()
        if file.path not in self.plain_promises:
            return
        payload, deadline, rights, plains = self.plain_promises[file.path]
        if plains in self.dead:
            return  # its writer is dead: the file lasts until the deadline
        self.plain_promises[file.path] = payload, deadline, rights - {file}, plains
        if not rights - {file}:
            del self.plain_promises[file.path]
            assert not file.path.exists()

    @rule(file=plain_files)
    def read_a_plain_file_that_is_released_meanwhile(self, file):
        """As a slow engine does."""
        if file.path in self.plain_promises and file.path.exists():
            payload = self.plain_promises[file.path][0]
            with file.path.open("rb", buffering=0) as reader:
                first = reader.read(1)
                self.release_a_plain_file(file)
                assert first + reader.read() == payload

    @rule(seconds=st.sampled_from((0.5, 2.0, 20.0)))
    def wait(self, seconds):
        self.clock.now += seconds

    @rule(which=st.integers(0, 1))
    def collect_and_trim(self, which):
        trim(self.pools[which])

    @rule(which=st.integers(0, 1))
    def kill_a_writer(self, which):
        crash_pool(self.pools[which], self.drafts_of(self.pools[which]))
        self.plains[which].abandon()
        self.replace(which)

    def drafts_of(self, pool):
        return [draft for owner, draft in self.unpublished if owner is pool]

    def replace(self, which):
        self.dead |= {self.pools[which], self.plains[which]}
        self.pools[which], self.plains[which] = self.pool(), self.plain()

    @rule(which=st.integers(0, 1))
    def end_a_writer(self, which):
        for draft in self.drafts_of(self.pools[which]):
            draft.release()
        for writer in (self.pools[which], self.plains[which]):
            writer.close()
            writer.close()
            assert outcome(lambda writer=writer: writer.put(b"late", ".png"))[1] == "full"
        self.replace(which)

    @rule()
    def janitor(self):
        before, slots, files = bytes_below(self.root), self.count_of("slot"), self.count_of("plain")
        folders = os.listdir(self.root)
        done = reclaim(self.root, self.clock.now)
        assert (slots - self.count_of("slot"), files - self.count_of("plain")) == (done.slots, done.files)
        assert {writer.name for writer in (*self.pools, *self.plains)} <= set(os.listdir(self.root))
        assert len(folders) - len(os.listdir(self.root)) == done.pools
        assert bytes_below(self.root) <= before - done.bytes
        # Held views stay readable, and promised files stay in place.
        for view in self.held:
            assert (self.root / view.handle.path).exists()
        for (path, _), deadline in self.promised.items():
            assert deadline <= self.clock.now or (self.root / path).exists()
        for path, (_, deadline, _, plains) in list(self.plain_promises.items()):
            if plains in self.dead and deadline <= self.clock.now:
                assert not path.exists()
                del self.plain_promises[path]

    def count_of(self, kind):
        return len(list(self.root.glob(f"*/{kind}-*")))

    @invariant()
    def held_views_do_not_change(self):
        for view, payload in self.held.items():
            assert bytes(view.data) == payload

    @invariant()
    def plain_files_exist_until_they_are_released(self):
        for path, (payload, deadline, _, plains) in self.plain_promises.items():
            if plains not in self.dead or self.clock.now < deadline:
                assert path.read_bytes() == payload

    @invariant()
    def bytes_are_conserved(self):
        files = ledger(self.root, self.clock.now)
        assert files.bytes == bytes_below(self.root)
        for pool in self.pools:
            slots = [entry.bytes for entry in files.entries if entry.path.startswith(f"{pool.name}/slot-")]
            assert pool.lent_bytes <= sum(slots) == pool.bytes <= LIMIT
        for plains in self.plains:
            own = [entry.bytes for entry in files.entries if entry.path.startswith(f"{plains.name}/plain-")]
            assert sum(own) == plains.bytes <= LIMIT


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=settings.default.max_examples // 2, stateful_step_count=40, deadline=None)
