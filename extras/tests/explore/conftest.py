"""The explorer's page in Chromium."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flashtile_lab.explore import write
from tests.browser import Tab, browser


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("page") / "explore.html").as_uri()


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with browser() as opened:
        yield opened


@pytest.fixture
def opened(tab: Tab, address: str) -> Tab:
    tab.open(address)
    assert tab.run("explore.ready")
    return tab
