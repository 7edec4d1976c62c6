"""Leases under any order of events: a machine that draws them, real files and locks, and a clock that it turns."""

import os
import shutil
import tempfile
from functools import partial
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from handover.tests.support import TMPFS, Clock, bytes_below, crash_plain_files, crash_pool, outcome
from mmrouter_handover.shm import Plains, Pool, Reader, ledger, reclaim
from mmrouter_handover.shm.slot_sizes import file_bytes, slot_bytes

KIB = 1 << 10
LIMIT = 3 * slot_bytes(1) + slot_bytes(100 * KIB)
SIZES = (1, 5000, 100 * KIB)


class Leases(RuleBasedStateMachine):
    """Two writers that die and come back, each of slots and of plain files, two readers, a janitor.

    A payload is told from all others by its number, so whoever reads a slot that was used again reads another number.
    """

    handles = Bundle("handles")
    drafts = Bundle("drafts")
    views = Bundle("views")
    plain_files = Bundle("plain_files")

    def __init__(self):
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="mmrouter-transfer-", dir=TMPFS if TMPFS.is_dir() else None))
        self.clock = Clock()
        self.count = 0
        self.pools = [self.pool(), self.pool()]
        self.plains = [self.plain(), self.plain()]
        self.plain_promises = {}
        """Plain files that must be there: path to payload, deadline, and the rights to it; which end with their
        writer."""
        self.dead = set()
        self.readers = [Reader(self.root), Reader(self.root, mapped_bytes=1)]
        self.all_handed_over = []
        self.unpublished = []
        self.over = set()
        """Handles that must not be read any more, by path and generation."""
        self.promised = {}
        """Handles that must be readable: path and generation to deadline."""
        self.held = {}
        """Views that are held, and what they must show."""

    def pool(self):
        return Pool(self.root, "writer", limit_bytes=LIMIT, high_water=1.0, now=self.clock)

    def plain(self):
        return Plains(self.root, "writer", LIMIT, high_water=1.0, now=self.clock)

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
        for pool in self.pools:
            crash_pool(pool)
        for plains in self.plains:
            crash_plain_files(plains)
        self.clock.now += 3600
        reclaim(self.root, self.clock.now)
        left = bytes_below(self.root), os.listdir(self.root)
        shutil.rmtree(self.root)
        assert left == (0, [])

    def hand_over(self, which, size, seconds):
        payload = self.payload(size)
        lease = self.pools[which].put(payload, f"payload {self.count}", seconds=seconds)
        key = (lease.handle.path, lease.handle.generation)
        # The slot is nobody else's: not read, and under no lease that still holds.
        assert all(view.handle.path != lease.handle.path for view in self.held)
        for path, generation in list(self.promised):
            if path == lease.handle.path:
                assert self.promised.pop((path, generation)) <= self.clock.now
        for handle, *_ in self.known(lease.handle.path):
            self.over.add((handle.path, handle.generation))
        self.over.discard(key)
        self.promised[key] = self.clock.now + seconds
        return lease, payload

    def known(self, path):
        return [item for item in self.all_handed_over if item[0].path == path]

    @rule(target=handles, which=st.integers(0, 1), size=st.sampled_from(SIZES), seconds=st.sampled_from((1.0, 10.0)))
    def put(self, which, size, seconds):
        found, why = outcome(lambda: self.hand_over(which, size, seconds))
        if found is None:
            assert why == "full"
            assert self.pools[which].lent_bytes + slot_bytes(size) > LIMIT
            return multiple()
        lease, payload = found
        item = (lease.handle, payload, lease, self.pools[which])
        self.all_handed_over.append(item)
        return item

    @rule(target=views, which=st.integers(0, 1), size=st.sampled_from(SIZES), cancelled=st.booleans())
    def put_and_hold(self, which, size, cancelled):
        """What matters most, and is rarely drawn step by step: a slot that is read while its lease ends."""
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
        for handle, *_ in self.known(f"{self.pools[which].name}/{lease._slot.name}"):
            key = (handle.path, handle.generation)
            assert self.promised.pop(key, 0.0) <= self.clock.now
            assert all(view.handle.path != handle.path for view in self.held)
            self.over.add(key)
        self.unpublished.append(lease)
        return lease

    @rule(draft=drafts)
    def give_a_draft_up(self, draft):
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
    def let_go(self, view, acknowledge):
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
            return  # whoever had the right is gone, and its promise lasts until the deadline
        self.plain_promises[file.path] = payload, deadline, rights - {file}, plains
        if not rights - {file}:
            del self.plain_promises[file.path]
            assert not file.path.exists()

    @rule(file=plain_files)
    def read_a_plain_file_that_is_given_up_meanwhile(self, file):
        """As an engine does that is slow."""
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
        self.pools[which].trim()

    @rule(which=st.integers(0, 1))
    def kill_a_writer(self, which):
        crash_pool(self.pools[which], [draft for draft in self.unpublished if draft._pool is self.pools[which]])
        crash_plain_files(self.plains[which])
        self.replace(which)

    def replace(self, which):
        self.dead |= {self.pools[which], self.plains[which]}
        self.pools[which], self.plains[which] = self.pool(), self.plain()

    @rule(which=st.integers(0, 1))
    def end_a_writer(self, which):
        for draft in self.unpublished:
            if draft._pool is self.pools[which]:
                draft.release()
        self.pools[which].close()
        self.plains[which].close()
        self.replace(which)

    @rule()
    def janitor(self):
        before = bytes_below(self.root)
        folders = os.listdir(self.root)
        done = reclaim(self.root, self.clock.now)
        assert {writer.name for writer in (*self.pools, *self.plains)} <= set(os.listdir(self.root))
        assert len(folders) - len(os.listdir(self.root)) == done.pools
        assert bytes_below(self.root) <= before - done.bytes
        # What is held can still be read, and what is promised lies where it lay.
        for view in self.held:
            assert (self.root / view.handle.path).exists()
        for (path, _), deadline in self.promised.items():
            assert deadline <= self.clock.now or (self.root / path).exists()
        for path, (_, deadline, _, plains) in list(self.plain_promises.items()):
            if plains in self.dead and deadline <= self.clock.now:
                assert not path.exists()
                del self.plain_promises[path]

    @invariant()
    def what_is_held_does_not_change(self):
        for view, payload in self.held.items():
            assert bytes(view.data) == payload

    @invariant()
    def plain_files_are_there_until_they_are_given_up(self):
        for path, (payload, deadline, _, plains) in self.plain_promises.items():
            if plains not in self.dead or self.clock.now < deadline:
                assert path.read_bytes() == payload

    @invariant()
    def bytes_are_conserved(self):
        found = ledger(self.root, self.clock.now)
        assert found.bytes == bytes_below(self.root)
        for pool in self.pools:
            slots = [entry.bytes for entry in found.entries if entry.path.startswith(f"{pool.name}/slot-")]
            idle = sum(slot.size for slot in pool._idle_slots())
            assert sum(slots) == pool.bytes == pool.lent_bytes + idle <= LIMIT
        for plains in self.plains:
            own = [entry.bytes for entry in found.entries if entry.path.startswith(f"{plains.name}/plain-")]
            assert sum(own) == plains.bytes <= LIMIT


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
