"""A router that fails under many clients has an error and no other figure."""

from bench.serving.many_connections import Seen, rows


def test_an_error_of_ours_is_the_only_row():
    (only,) = rows({"mmrouter": Seen(error="closed"), "smg": Seen(mib=10)}, [])
    assert (only.value, only.met, only.peer) == (1.0, False, "closed")


def test_a_peer_with_an_error_is_named_and_not_compared_with():
    seen = {"mmrouter": Seen(mib=15), "smg": Seen(mib=5, error="reset"), "sglang-router": Seen(mib=10)}
    ratio = rows(seen, [])[-1]
    assert (ratio.value, ratio.met) == (1.5, True)
    assert ratio.peer == "smg: reset; sglang-router: 10 MiB"


def test_without_any_peer_there_is_no_ratio_but_the_reasons():
    ratio = rows({"mmrouter": Seen(mib=15)}, ["no index"])[-1]
    assert (ratio.value, ratio.peer) == (None, "not run: no index")
