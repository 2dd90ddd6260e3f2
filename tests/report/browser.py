"""A real browser that opens pages from files."""

import shutil
from contextlib import contextmanager

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
QUIET = ("background-networking", "component-update", "sync", "gpu")


@contextmanager
def started():
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    arguments = ["--no-sandbox", "--no-first-run", *(f"--disable-{what}" for what in QUIET)]
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


@contextmanager
def opening(browser, path):
    """What opens the page; afterwards, it has complained about nothing and asked for nothing."""
    contexts, complaints, requests = [], [], []

    def open_page(width=1200, **options):
        contexts.append(browser.new_context(viewport={"width": width, "height": 800}, **options))
        tab = contexts[-1].new_page()
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("dialog", lambda dialog: complaints.append(dialog.message))
        tab.on("request", lambda request: requests.append(request.url))
        tab.goto(path.as_uri())
        tab.wait_for_selector(".chart .curve")
        return tab

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
    assert {url.split("#")[0] for url in requests if not url.startswith("data:")} == {path.as_uri()}
