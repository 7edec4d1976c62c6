import contextlib
import ipaddress
from urllib.parse import urlsplit

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mmrouter_lib.api import Media as MediaSettings
from mmrouter_router.media.guard import Guard, parse, redirected
from mmrouter_router.media.types import MediaError

PUBLIC = ipaddress.ip_address("93.184.216.34")
PRIVATE = ipaddress.ip_address("10.0.0.1")


def guard(**media):
    return Guard.of(MediaSettings(**media))


REFUSED = {
    "file:///etc/passwd": "scheme",
    "ftp://a.example/x": "scheme",
    "gopher://a.example/": "scheme",
    "a.example/x.png": "scheme",
    "//a.example/x.png": "scheme",
    "": "scheme",
    " http://a.example/": "scheme",
    "http:/a.example/x": "url",
    "http:///x": "url",
    "http://": "url",
    "http://a.example/a b": "url",
    "http://a.example/\r\nX-Evil: 1": "url",
    "http://a.example/\x00": "url",
    "http://a.example\\@b.example/": "url",
    "http://user@a.example/": "url",
    "http://user:pass@a.example/": "url",
    "http://:@a.example/": "url",
    "http://@a.example/": "url",
    "http://a.example:70000/": "url",
    "http://a.example:0/": "url",
    "http://a.example:x/": "url",
    "http://[::1/": "url",
    "http://[fe80::1%25eth0]/": "url",
    "http://a..example/": "url",
    "http://-a.example/": "url",
    "http://a%2eexample/": "url",
    "http://%31%32%37.0.0.1/": "url",
    "http://127.0.0.1%00.a.example/": "url",
    "http://0x7f.1/": "url",
    "http://0x7f000001/": "url",
    "http://2130706433/": "url",
    "http://127.1/": "url",
    "http://0177.0.0.1/": "url",
    "http://127.0.0.1.1/": "url",
    "http://" + "a." * 200 + "example/": "url",
    "http://a.example/" + "x" * 9000: "url",
}


@pytest.mark.parametrize("text", REFUSED)
def test_ambiguous_urls_are_refused(text):
    with pytest.raises(MediaError) as caught:
        parse(text)
    assert caught.value.reason == REFUSED[text]


@pytest.mark.parametrize(
    ("text", "host", "port", "sent"),
    [
        ("HTTP://Images.Example.:8080/A?b#c", "images.example", 8080, "http://images.example:8080/A?b"),
        ("https://a.example", "a.example", 443, "https://a.example/"),
        ("https://a.example?x", "a.example", 443, "https://a.example/?x"),
        ("http://b\u00fccher.example/", "xn--bcher-kva.example", 80, "http://xn--bcher-kva.example/"),
        ("http://\uff11\uff12\uff17.0.0.1/", "127.0.0.1", 80, "http://127.0.0.1/"),
        ("http://[::0001]:81/", "::1", 81, "http://[::1]:81/"),
        ("http://a_b.example/", "a_b.example", 80, "http://a_b.example/"),
        ("http://a.example/%7e%2F?s=%7e+%2b/", "a.example", 80, "http://a.example/%7e%2F?s=%7e+%2b/"),
        ("http://a.example/\u00fc?\u00e4", "a.example", 80, "http://a.example/%C3%BC?%C3%A4"),
    ],
)
def test_checked_url_is_the_sent_url(text, host, port, sent):
    target = parse(text)
    assert (target.host, target.port, str(target.url)) == (host, port, sent)


@settings(max_examples=60, deadline=None)
@given(st.one_of(st.text(), st.builds("{}://{}".format, st.sampled_from(["http", "https"]), st.text())))
@example("http://a.example#@b.example/")
@example("http://a.example?@b.example/")
@example("http://a.example;@b.example/")
@example("http://a.example/@b.example")
def test_any_text_is_refused_or_has_one_host_for_all_parsers(text):
    with contextlib.suppress(MediaError):
        target = parse(text)
        assert target.url.raw_host == target.host
        if text.isascii():
            assert urlsplit(text).hostname.removesuffix(".") == target.host or target.literal is not None
        assert str(target.url).isascii()


def test_data_only_refuses_all_urls():
    with pytest.raises(MediaError) as caught:
        guard(fetch="dataOnly").target("https://a.example/")
    assert caught.value.reason == "fetch_disabled"


@pytest.mark.parametrize(
    ("url", "accepted"),
    [
        ("https://a.example/", True),
        ("https://A.Example./", True),
        ("https://b.a.example/", False),
        ("https://b.example/", False),
        ("https://x.b.example/", True),
        ("https://x.y.b.example/", True),
        ("https://xb.example/", False),
        ("https://a.example.evil.example/", False),
        ("https://10.0.0.1/", True),
        ("https://[2a00::1]/", True),
        ("https://10.0.0.2/", False),
    ],
)
def test_host_list_admits_only_its_hosts(url, accepted):
    rules = guard(fetch="allowList", allowed_hosts=["A.example", "*.b.example", "10.0.0.1", "[2a00:0::1]"])
    if accepted:
        rules.target(url)
    else:
        with pytest.raises(MediaError) as caught:
            rules.target(url)
        assert caught.value.reason == "host"


def test_allowed_host_does_not_unlock_its_private_address():
    rules = guard(fetch="allowList", allowed_hosts=["a.example"])
    target = rules.target("https://a.example/")
    rules.check(target, [PUBLIC])
    with pytest.raises(MediaError) as caught:
        rules.check(target, [PRIVATE])
    assert caught.value.reason == "address"
    assert "10.0.0.1" not in caught.value.sentence


def test_one_private_address_refuses_the_host():
    rules = guard(fetch="public")
    with pytest.raises(MediaError):
        rules.check(parse("http://a.example/"), [PUBLIC, PRIVATE])


def test_host_without_addresses_is_unreachable():
    with pytest.raises(MediaError) as caught:
        guard(fetch="public").check(parse("http://a.example/"), [])
    assert caught.value.reason == "unreachable"


@pytest.mark.parametrize(
    ("media", "url", "address", "accepted"),
    [
        ({"fetch": "public"}, "http://a.example:80/", PUBLIC, True),
        ({"fetch": "public"}, "https://a.example/", PUBLIC, True),
        ({"fetch": "public"}, "http://a.example:443/", PUBLIC, False),
        ({"fetch": "public"}, "http://a.example:6379/", PUBLIC, False),
        ({"fetch": "public", "allowed_hosts": ["a.example"]}, "http://a.example:8080/", PUBLIC, True),
        ({"fetch": "public", "allowed_cidrs": ["10.0.0.0/8"]}, "http://a.example:8080/", PRIVATE, True),
        ({"fetch": "public", "allowed_cidrs": ["10.0.0.0/8"]}, "http://a.example:8080/", PUBLIC, False),
    ],
)
def test_other_ports_need_an_allowed_host_or_range(media, url, address, accepted):
    rules = guard(**media)
    if accepted:
        rules.check(rules.target(url), [address])
    else:
        with pytest.raises(MediaError) as caught:
            rules.check(rules.target(url), [address])
        assert caught.value.reason == "port"


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ("/b?c", "https://a.example/b?c"),
        ("b", "https://a.example/x/b"),
        ("//b.example/", "https://b.example/"),
        ("https://b.example/", "https://b.example/"),
        ("file:///etc/passwd", "file:///etc/passwd"),
        ("http://a.example/", None),
        ("http://[::1", None),
    ],
)
def test_redirects_are_resolved_and_never_lose_encryption(location, expected):
    target = parse("https://a.example/x/y")
    if expected is not None:
        assert redirected(target, location) == expected
    else:
        with pytest.raises(MediaError) as caught:
            redirected(target, location)
        assert caught.value.reason == "redirect"
