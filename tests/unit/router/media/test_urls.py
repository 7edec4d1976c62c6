"""URLs of media: data URIs, URLs that may be fetched, and the addresses behind their hosts."""

import base64
import contextlib
import ipaddress
from ipaddress import IPv4Address, IPv6Address
from urllib.parse import quote_from_bytes, urlsplit

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from unit.conftest import examples

from mmrouter_cli.sample_images import data_uri
from mmrouter_lib.api import Media as MediaSettings
from mmrouter_router.media import content
from mmrouter_router.media.content import MediaError, decode
from mmrouter_router.media.guard import Guard, covered, networks, parse, redirected, refusal

PUBLIC = ipaddress.ip_address("93.184.216.34")
PRIVATE = ipaddress.ip_address("10.0.0.1")


def guard(**media):
    return Guard(MediaSettings(**media))


def reason_of(call, *arguments) -> str:
    """Why a call is refused; empty where it is not."""
    try:
        call(*arguments)
    except MediaError as error:
        return error.reason
    return ""


NO_HTTP = """
file:///etc/passwd ftp://a.example/x gopher://a.example/ a.example/x.png //a.example/x.png
"""
AMBIGUOUS = """
http:/a.example/x http:///x http:// http://a.example\\@b.example/
http://user@a.example/ http://user:pass@a.example/ http://:@a.example/ http://@a.example/
http://a.example:70000/ http://a.example:0/ http://a.example:x/ http://[::1/ http://[::1]:@/ http://[fe80::1%25eth0]/
http://a..example/ http://-a.example/ http://a%2eexample/ http://%31%32%37.0.0.1/ http://127.0.0.1%00.a.example/
http://0x7f.1/ http://[::ffff:0x7f.1]/ http://0x7f000001/ http://2130706433/ http://127.1/ http://0177.0.0.1/ http://127.0.0.1.1/
"""
ODD = ["http://a.example/a b", "http://a.example/\r\nX-Evil: 1", "http://a.example/\x00"]
LONG = ["http://" + "a." * 200 + "example/", "http://a.example/" + "x" * 9000]


@pytest.mark.parametrize("text", ["", " http://a.example/", *NO_HTTP.split()])
def test_urls_of_other_schemes_are_refused(text):
    assert reason_of(parse, text) == "scheme"


@pytest.mark.parametrize("text", [*AMBIGUOUS.split(), *ODD, *LONG])
def test_ambiguous_urls_are_refused(text):
    assert reason_of(parse, text) == "url"


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


@settings(max_examples=examples(60), deadline=None)
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


LISTED = """
https://a.example/ https://A.Example./ https://x.b.example/ https://x.y.b.example/
https://10.0.0.1/ https://[2a00::1]/
"""
UNLISTED = """
https://b.a.example/ https://b.example/ https://xb.example/ https://a.example.evil.example/ https://10.0.0.2/
"""


@pytest.mark.parametrize(
    ("url", "accepted"), [(url, text is LISTED) for text in (LISTED, UNLISTED) for url in text.split()]
)
def test_host_list_admits_only_its_hosts(url, accepted):
    rules = guard(fetch="allowList", allowed_hosts=["A.example", "*.b.example", "10.0.0.1", "[2a00:0::1]"])
    assert reason_of(rules.target, url) == ("" if accepted else "host")


def test_allowed_host_does_not_unlock_its_private_address():
    rules = guard(fetch="allowList", allowed_hosts=["a.example"])
    target = rules.target("https://a.example/")
    rules.check(target, [PUBLIC])
    with pytest.raises(MediaError) as caught:
        rules.check(target, [PRIVATE])
    assert caught.value.reason == "address"
    assert "10.0.0.1" not in caught.value.sentence


def test_host_without_addresses_is_unreachable():
    assert reason_of(guard(fetch="public").check, parse("http://a.example/"), []) == "unreachable"


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
    assert reason_of(rules.check, rules.target(url), [address]) == ("" if accepted else "port")


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
    if expected is None:
        assert reason_of(redirected, target, location) == "redirect"
    else:
        assert redirected(target, location) == expected


EVERYTHING = networks(["0.0.0.0/0", "::/0"])

ADDRESSES = {
    address: kind
    for kind, addresses in {
        "loopback": "127.0.0.1 127.255.255.254 ::1 ::ffff:127.0.0.1",
        "private": "10.1.2.3 172.31.255.255 192.168.0.1 fd12:3456::1 fec0::1 64:ff9b::10.0.0.1",
        "shared": "100.64.0.1",
        "link_local": (
            "169.254.169.254 169.254.1.1 fe80::1 fe80::1%eth0 ::ffff:169.254.169.254 "
            "64:ff9b::169.254.169.254 2002:a9fe:a9fe::1 2001:0:4136:e378:8000:63bf:5601:5601 "
            "2a00:1450::200:5efe:a9fe:a9fe"
        ),
        "metadata": "fd00:ec2::254 fd20:ce::254 168.63.129.16 100.100.100.200",
        "unspecified": "0.0.0.0 0.1.2.3 ::",
        "multicast": "224.0.0.1 ff02::1",
        "broadcast": "255.255.255.255",
        "reserved": "240.0.0.1 192.0.0.8 2001:10::1 4000::1",
        "documentation": "192.0.2.1 2001:db8::1 3fff::1",
        "benchmark": "198.18.0.1",
        "tunnel": (
            "64:ff9b:1::10.0.0.1 ::127.0.0.1 ::ffff:0:127.0.0.1 2002:7f00:1:: "
            "2001:0:4136:e378:8000:63bf:3fff:fdd2 2a00:1450::5efe:7f00:1"
        ),
        None: "8.8.8.8 ::ffff:8.8.8.8 64:ff9b::8.8.8.8 2a00:1450:4001:830::200e",
    }.items()
    for address in addresses.split()
}
"""Reason for which each address is refused without allowed ranges."""


@pytest.mark.parametrize("text", ADDRESSES)
def test_non_public_addresses_are_refused_by_kind(text):
    assert refusal(ipaddress.ip_address(text), ()) == ADDRESSES[text]


@pytest.mark.parametrize("text", ADDRESSES)
def test_no_range_unlocks_link_local_and_metadata_addresses(text):
    never = {"link_local", "metadata", "unspecified", "multicast", "broadcast"}
    expected = ADDRESSES[text] if ADDRESSES[text] in never else None
    assert refusal(ipaddress.ip_address(text), EVERYTHING) == expected


def test_range_unlocks_its_addresses_in_every_notation():
    allowed = networks(["10.0.0.0/8"])
    for text in ("10.0.0.1", "::ffff:10.0.0.1", "64:ff9b::10.0.0.1"):
        assert refusal(ipaddress.ip_address(text), allowed) is None
        assert covered(ipaddress.ip_address(text), allowed)
    for text in ("11.0.0.1", "192.168.0.1", "::ffff:192.168.0.1", "2002:a00:1::", "::10.0.0.1"):
        assert not covered(ipaddress.ip_address(text), allowed)
    assert refusal(IPv4Address("192.168.0.1"), allowed) == "private"
    assert refusal(IPv6Address("2002:a00:1::"), allowed) == "tunnel"


def test_mapped_range_is_its_ipv4_range():
    assert networks(["::ffff:10.0.0.0/104", "10.1.2.3/8"]) == (ipaddress.ip_network("10.0.0.0/8"),) * 2


@settings(max_examples=examples(150), deadline=None)
@given(st.ip_addresses())
def test_accepted_addresses_are_global_for_ipaddress(address):
    if refusal(address, ()) is None:
        inner = IPv4Address(int(address) & 0xFFFFFFFF) if address in ipaddress.ip_network("64:ff9b::/96") else address
        inner = getattr(inner, "ipv4_mapped", None) or inner
        assert inner.is_global
        for trait in ("is_private", "is_loopback", "is_link_local", "is_multicast", "is_reserved", "is_unspecified"):
            assert not getattr(inner, trait), trait


@settings(max_examples=examples(150), deadline=None)
@given(st.ip_addresses(v=4))
def test_embedded_address_is_judged_as_itself(address):
    number = int(address)
    for wrapped in (IPv6Address(0xFFFF << 32 | number), IPv6Address(0x64FF9B << 96 | number)):
        assert refusal(wrapped, ()) == refusal(address, ())
        assert refusal(wrapped, EVERYTHING) == refusal(address, EVERYTHING)
    tunnels = [
        IPv6Address(0x2002 << 112 | number << 80 | 1),
        IPv6Address(0x20010000 << 96 | 0x08080808 << 64 | number ^ 0xFFFFFFFF),
        IPv6Address(0x2A001450 << 96 | 0x5EFE << 32 | number),
        IPv6Address(0xFFFF << 48 | number),
    ]
    for tunnel in tunnels:
        assert refusal(tunnel, ()) is not None
        assert refusal(tunnel, EVERYTHING) == refusal(address, EVERYTHING)


LIMIT = 1000


@settings(max_examples=examples(60), deadline=None)
@given(st.binary(min_size=1, max_size=200), st.sampled_from(["data:", "DATA:", "dAtA:image/png", "data:a/b;c=d"]))
def test_both_encodings_are_decoded(data, start):
    text = base64.b64encode(data).decode()
    for uri in (
        f"{start};base64,{text}",
        f"{start};BASE64,{text}",
        f"{start};base64,{text.replace('+', '%2B').replace('=', '%3d')}",
        f"{start},{quote_from_bytes(data)}",
        f"{start},{quote_from_bytes(data, safe='')}",
    ):
        assert decode(uri, LIMIT) == data


@pytest.mark.parametrize("form", [data_uri, lambda data: "data:," + quote_from_bytes(data)])
@pytest.mark.parametrize("size", [LIMIT - 2, LIMIT - 1, LIMIT])
def test_limit_is_the_number_of_decoded_bytes(form, size):
    assert len(decode(form(b"\xff" * size), LIMIT)) == size
    assert reason_of(decode, form(b"\xff" * (size + 3)), LIMIT) == "too_large"


BROKEN = """
data:image/png;base64 data: image/png;base64,AAAA data:;base64,A data:;base64,AA data:;base64,AAA data:;base64,AA==AA==
data:;base64,AA%0AAA data:;base64,_-_- data:;base64,\u00c4AAA data:;base64,%zzAA data:,% data:,%4 data:,\u00e4
"""
SPACED = ["data:;base64,AA A", "data:;base64,AAAA\n", "data:,a b"]


@pytest.mark.parametrize("uri", [*BROKEN.split(), *SPACED, "data:" + "x" * 600 + ",a"])
def test_ambiguous_uris_are_refused(uri):
    assert reason_of(decode, uri, LIMIT) == "data_uri"


@pytest.mark.parametrize("uri", ["data:image/png;base64,", "data:,"])
def test_empty_uris_are_refused(uri):
    assert reason_of(decode, uri, LIMIT) == "empty"


@settings(max_examples=examples(60), deadline=None)
@given(st.text(alphabet=st.characters(max_codepoint=300), max_size=60))
def test_any_uri_is_decoded_like_the_standard_library_or_refused(text):
    with contextlib.suppress(MediaError):
        data = decode("data:;base64," + text, LIMIT)
        if "%" not in text:
            assert data == base64.b64decode(text, validate=True)


def test_oversized_uri_is_refused_before_decoding():
    assert reason_of(decode, "data:;base64," + "?" * 2000, LIMIT) == "too_large"


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"\x89PNG\r\n\x1a\n....", "image/png"),
        (b"\xff\xd8\xff\xe0", "image/jpeg"),
        (b"GIF89a", "image/gif"),
        (b"RIFF\x00\x00\x00\x00WEBPVP8 ", "image/webp"),
        (b"RIFF\x00\x00\x00\x00WAVEfmt ", "audio/wav"),
        (b"RIFF\x00\x00\x00\x00????", content.UNKNOWN),
        (b"\x00\x00\x00\x20ftypavif", "image/avif"),
        (b"\x00\x00\x00\x20ftypisom", "video/mp4"),
        (b"", content.UNKNOWN),
        (b"hello", content.UNKNOWN),
    ],
)
def test_type_is_detected_from_the_bytes(data, kind):
    assert content.detect(data) == kind


def test_web_pages_are_recognised():
    assert content.is_page(b"\xef\xbb\xbf \n<!DOCTYPE HTML><html>")
    assert content.is_page(b'<svg xmlns="http://www.w3.org/2000/svg">')
    assert not content.is_page(b"\x89PNG\r\n\x1a\n<html>")
