"""Whatever happens to encoders and requests, in any order: nothing is lost, doubled, or left behind."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mmrouter_router.core.linear_cost import Line
from mmrouter_router.encoding.encoder_queue import Encoder, Image
from mmrouter_router.encoding.scheduler import EncoderScheduler

KEYS = [bytes([number]) for number in range(12)]
TOKENS = {key: 4 + 100 * number for number, key in enumerate(KEYS)}
QUEUE, ENTRIES, BYTES = 5, 4, 700


class Everything(RuleBasedStateMachine):
    """The scheduler beside what a caller knows: who waits for what, and what is being encoded where."""

    mode = "auto"

    def __init__(self):
        super().__init__()
        self.encoders = EncoderScheduler(self.mode, first=lambda kind: Line(0.01, 0.001 * len(kind)))
        self.now = 0.0
        self.joined = 0
        self.present: list[str] = []
        self.asked = 0
        self.waiting: dict[str, list[Image]] = {}
        self.runs: dict[int, tuple[str, bytes]] = {}
        self.encoded: set[tuple[str, bytes, str]] = set()
        self.seen: set[int] = set()
        self.untroubled = True
        self.slots: dict[str, int] = {}

    def apply(self, outcome):
        for run in outcome.aborts:
            del self.runs[run]
        for start in outcome.starts:
            assert start.run not in self.seen
            self.seen.add(start.run)
            self.runs[start.run] = (start.encoder, start.image.key)
        for request, answers in outcome.ready.items():
            for image, answer in zip(self.waiting.pop(request), answers, strict=True):
                assert (image.key, answer) in self.encoded
        for request in outcome.failed:
            del self.waiting[request]

    @rule(kind=st.sampled_from(["a", "bb", "cccccc"]), slots=st.integers(1, 2), weight=st.integers(0, 3))
    @precondition(lambda self: len(self.present) < 4)
    def join(self, kind, slots, weight):
        self.joined += 1
        name = f"e{self.joined}"
        self.present.append(name)
        self.slots[name] = slots
        encoder = Encoder(name, kind, weight=weight, queue=QUEUE, slots=slots, cache_entries=ENTRIES, cache_bytes=BYTES)
        self.apply(self.encoders.join(encoder, self.now))

    @rule(data=st.data())
    @precondition(lambda self: self.present)
    def leave(self, data):
        name = data.draw(st.sampled_from(self.present))
        self.present.remove(name)
        self.untroubled = False
        self.apply(self.encoders.leave(name, self.now))

    def backlogs(self):
        return {queue.id: queue.free_at(self.now) - self.now for queue in self.encoders.queues.values()}

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=6))
    def place(self, keys):
        self.asked += 1
        request, images = f"r{self.asked}", [Image(key, TOKENS[key], TOKENS[key] // 2) for key in keys]
        before = self.backlogs()
        outcome = self.encoders.place(request, images, self.now)
        if outcome.full:
            assert self.backlogs() == before
            assert keys
            return
        self.waiting[request] = images
        assert len(outcome.placed) == len(images)
        assert all(finish >= self.now for placed in outcome.placed for _, finish in placed.weighed)
        # More work makes no encoder finish earlier.
        after = self.backlogs()
        assert all(after[name] >= seconds - 1e-9 for name, seconds in before.items())
        self.apply(outcome)

    @rule(data=st.data())
    @precondition(lambda self: self.runs)
    def finish(self, data):
        run = data.draw(st.sampled_from(sorted(self.runs)))
        _, key = self.runs.pop(run)
        self.encoded.add((key, f"answer {run}"))
        self.apply(self.encoders.finished(run, self.now, f"answer {run}"))

    @rule(data=st.data(), refused=st.booleans())
    @precondition(lambda self: self.runs)
    def fail(self, data, refused):
        run = data.draw(st.sampled_from(sorted(self.runs)))
        del self.runs[run]
        self.untroubled = False
        self.apply(self.encoders.failed(run, self.now, refused=refused))

    @rule(data=st.data())
    @precondition(lambda self: self.waiting)
    def cancel(self, data):
        request = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[request]
        self.apply(self.encoders.cancel(request, self.now))

    @rule(run=st.integers(0, 50))
    def a_late_answer_changes_nothing(self, run):
        if run not in self.runs:
            assert self.encoders.finished(run, self.now).starts == []

    @rule(step=st.sampled_from([0.0, 0.001, 0.1, 3.0, 200.0]))
    def time_passes(self, step):
        self.now += step
        at = self.encoders.next_tick(self.now)
        assert at > self.now
        outcome = self.encoders.tick(self.now)
        self.untroubled = self.untroubled and not outcome.aborts
        self.apply(outcome)

    @invariant()
    def every_image_that_is_waited_for_is_in_one_place_and_nothing_else_is(self):
        queues = list(self.encoders.queues.values())
        jobs = [job for queue in queues for job in [*queue.waiting, *queue.running.values()]]
        counted = Counter(job.image.key for job in jobs)
        assert all(count == 1 for count in counted.values())
        wanted = set()
        for request, images in self.waiting.items():
            answered = self.encoders.requests[request].answers
            wanted |= {(request, image.key) for image in images if image.key not in answered}
        assert wanted == {(request, job.image.key) for job in jobs for request in job.waiters}
        assert {job.image.key for job in jobs} == set(self.encoders.jobs)
        assert all(job.waiters for job in jobs)
        assert set(self.encoders.requests) == set(self.waiting)

    @invariant()
    def what_runs_is_what_was_sent_and_not_answered(self):
        running = {
            run: (queue.id, j.image.key) for queue in self.encoders.queues.values() for run, j in queue.running.items()
        }
        assert running == self.runs
        assert set(self.encoders.runs) == set(self.runs)

    @invariant()
    def booked_work_is_the_sum_of_what_is_there(self):
        for queue in self.encoders.queues.values():
            assert queue.tokens_waiting == sum(job.image.tokens for job in queue.waiting)
            assert queue.tokens_running == sum(job.image.tokens for job in queue.running.values())
            assert [job.key for job in queue.waiting] == sorted(job.key for job in queue.waiting)
            assert all(job.queue is queue for job in [*queue.waiting, *queue.running.values()])

    @invariant()
    def bounds_hold_and_no_encoder_idles_beside_its_queue(self):
        for queue in self.encoders.queues.values():
            assert len(queue.running) <= self.slots[queue.id]
            assert len(queue.waiting) <= QUEUE or not self.untroubled
            assert not queue.waiting or not queue.has_slot
            assert not queue.leaving or (queue.running and not queue.waiting)
            assert len(queue.held) <= ENTRIES
            assert queue.held.bytes <= BYTES
            assert queue.held.bytes == sum(size for size, _ in queue.held.entries.values())
        assert sorted(self.present) == sorted(queue.id for queue in self.encoders.queues.values() if not queue.leaving)

    def teardown(self):
        for request in list(self.waiting):
            del self.waiting[request]
            self.apply(self.encoders.cancel(request, self.now))
        assert self.runs == {}
        assert self.encoders.jobs == self.encoders.requests == {}
        assert not any(queue.waiting or queue.running for queue in self.encoders.queues.values())
        assert not any(self.backlogs().values())


class PerImage(Everything):
    mode = "perImage"


class PerRequest(Everything):
    mode = "perRequest"


for machine, examples in ((Everything, 50), (PerImage, 15), (PerRequest, 15)):
    machine.TestCase.settings = settings(max_examples=examples, stateful_step_count=40, deadline=None)

TestAuto = Everything.TestCase
TestPerImage = PerImage.TestCase
TestPerRequest = PerRequest.TestCase
