"""The site of the documentation: complete, without a dead link, and without another host."""

import json
import re
from pathlib import Path

import pytest

from hack.build_once import CannotMakeError
from hack.docs.build_site import ROOT, build, moved, site_places
from mmrouter_lib import __version__


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    try:
        build(folder)  # strict: a dead link or heading, or a page that is in no menu, ends it
    except CannotMakeError as error:
        pytest.skip(f"not run: {error}")
    return folder


def test_every_page_of_the_documentation_is_in_the_site(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        assert (site / __version__ / page.relative_to(ROOT / "docs").with_suffix("") / "index.html").is_file(), page


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|img|link|iframe)\b[^>]*?(?:src|href)=\"?(?:https?:)?//[^\">]*", page.read_text()
        )
        assert not loaded, page


def test_the_first_page_leads_to_the_newest_version_and_older_ones_stay(site: Path) -> None:
    older = site / "0.0.9" / "index.html"
    older.parent.mkdir()
    older.write_text("older")
    build(site)
    assert f"url={__version__}/" in (site / "index.html").read_text()
    listed = json.loads((site / "versions.json").read_text())
    assert [(each["version"], each["aliases"]) for each in listed] == [(__version__, ["latest"]), ("0.0.9", [])]


def test_links_between_folders_follow_their_pages_into_the_site() -> None:
    places, docs = site_places(), ROOT / "docs"
    first = moved("[a](docs/cli.md#in-containers) [b](LICENSE)", ROOT / "README.md", places)
    assert first == "[a](cli.md#in-containers) [b](LICENSE)"
    assert moved("[a](../SECURITY.md)", docs / "tls.md", places) == "[a](SECURITY.md)"
    assert moved("[a](../exactness.md)", docs / "engine-facts" / "vllm.md", places) == "[a](../exactness.md)"
