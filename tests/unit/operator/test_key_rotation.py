"""Rotation of the feed's keys: any two processes with neighbouring steps can connect, and no pod restarts."""

import base64
from dataclasses import replace
from itertools import pairwise, product

import pytest
import zmq

from mmrouter_lib.feed_keys import fingerprint as name_of
from mmrouter_operator.model.credentials import SecretData, SecretError, fingerprint, new_secret_data, read_secret
from mmrouter_operator.model.key_rotation import LAST, next_step, router_fingerprints, sidecar_fingerprints


def steps(begin: SecretData) -> list[SecretData]:
    """Return the states of a Secret from before a rotation to after it."""
    states, step = [begin], ""
    while step != LAST:
        step, following = next_step(states[-1])
        states.append(following)
    return states


def stored(secrets: SecretData) -> SecretData:
    """Return what is read back of a Secret."""
    data = {name: base64.b64encode(value).decode() for name, value in secrets.entries().items()}
    return read_secret({"data": data})


def connects(router: SecretData, sidecar: SecretData) -> bool:
    """Whether some pair of the router's is accepted by the sidecar, and some expected key is the sidecar's."""
    served = zmq.curve_public(sidecar.sidecar_secret.split()[0].encode()).decode()
    pairs = {zmq.curve_public(secret.encode()).decode() for secret in router.router_secret.split()}
    return served in router.sidecar_public.split() and bool(pairs & set(sidecar.router_public.split()))


def test_processes_of_neighbouring_steps_connect_and_those_before_and_after_do_not() -> None:
    states = steps(new_secret_data())
    assert len(states) == 4
    for router, sidecar in product(range(4), repeat=2):
        if abs(router - sidecar) <= 1:
            assert connects(states[router], states[sidecar]), (router, sidecar)
    assert not connects(states[0], states[-1])
    assert not connects(states[-1], states[0])


def test_no_old_key_is_left_and_the_other_keys_stay() -> None:
    begin, *_, end = steps(new_secret_data())
    old = {begin.router_secret, begin.router_public, begin.sidecar_secret, begin.sidecar_public}
    assert not old & set(" ".join(value.decode(errors="replace") for value in end.entries().values()).split())
    assert (end.identity_key, end.control_token, end.engine_key) == (
        begin.identity_key,
        begin.control_token,
        begin.engine_key,
    )


def test_every_step_survives_the_secret_and_restarts_no_pod() -> None:
    begin = new_secret_data()
    twice = [*steps(begin), *steps(steps(begin)[-1])]
    for secrets in twice:
        assert stored(secrets) == secrets
        assert fingerprint(secrets) == fingerprint(begin)


@pytest.mark.parametrize("field", ["identity_key", "control_token", "engine_key"])
def test_another_key_that_changes_restarts_pods_after_a_rotation_too(field: str) -> None:
    end = steps(new_secret_data())[-1]
    changed = replace(end, **{field: getattr(new_secret_data(), field)})
    assert fingerprint(changed) != fingerprint(end)
    states = steps(changed)
    assert {fingerprint(secrets) for secrets in states} == {fingerprint(changed)}


def test_reports_differ_by_step_except_that_sidecars_do_not_have_the_last() -> None:
    states = steps(new_secret_data())
    assert all(router_fingerprints(a) != router_fingerprints(b) for a, b in pairwise(states))
    assert all(sidecar_fingerprints(a) != sidecar_fingerprints(b) for a, b in pairwise(states[:-1]))
    assert sidecar_fingerprints(states[0]) == [
        name_of(states[0].sidecar_public.encode()),
        name_of(states[0].router_public.encode()),
    ]


@pytest.mark.parametrize("entry", ["sidecar_secret", "router_public"])
@pytest.mark.parametrize("content", ["short", "a" * 41, "\n".join(["a" * 40] * 3), " "])
def test_entries_with_other_than_one_or_two_keys_are_refused(entry: str, content: str) -> None:
    with pytest.raises(SecretError, match=entry.replace("_", ".curve.")):
        stored(replace(new_secret_data(), **{entry: content}))
