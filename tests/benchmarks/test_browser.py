"""The report in headless Chromium, driven over plain HTTP (the WebDriver protocol)."""

import http.server
import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.request

import pytest

from dipole.benchmarks.report.write import write_report

HOSTILE = '<img src=x onerror="window.pwned=1"><script>window.pwned=1</script>\'"`{{7*7}}=1+1|</td>'
DRIVER = shutil.which("chromedriver")
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

MISSING = "needs Chromium: apt-get install chromium chromium-driver"
pytestmark = pytest.mark.skipif(not (DRIVER and BROWSER), reason=MISSING)


class Chromium:
    """One browser session."""

    def __init__(self, size=(1280, 900), dark=False):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.driver = subprocess.Popen([DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.base = f"http://127.0.0.1:{port}"
        self._wait()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--window-size={size[0]},{size[1]}"]
        options = {"binary": BROWSER, "args": flags}
        if size[0] < 500:
            metrics = {"width": size[0], "height": size[1], "pixelRatio": 1}
            options["mobileEmulation"] = {"deviceMetrics": metrics}
        capabilities = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        session = self._call("POST", "/session", {"capabilities": {"alwaysMatch": capabilities}})
        self.base += f"/session/{session['sessionId']}"

    def open(self, url):
        self._call("POST", "/url", {"url": url})

    def run(self, script, *arguments):
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def log(self):
        return self._call("POST", "/se/log", {"type": "browser"})

    def close(self):
        try:
            self._call("DELETE", "", None)
        finally:
            self.driver.terminate()
            self.driver.wait()

    def _wait(self):
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                if self._call("GET", "/status", None)["ready"]:
                    return
            except OSError:
                time.sleep(0.1)
        raise RuntimeError("chromedriver does not answer")

    def _call(self, method, path, body):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]


@pytest.fixture(scope="module")
def browser():
    found = Chromium()
    yield found
    found.close()


@pytest.fixture
def page(runs_folder, browser, tmp_path):
    """A report with a study, a paper's table, hostile names everywhere a user can write one; opened from the disk."""
    levels = {"vision": 0.9, "text": 0.6, "rl": 0.4}
    rows = [("infonce", "infonce", None), *((name, name, "infonce") for name in (HOSTILE, "hcl", "cacr"))]
    gain = {label: 0.01 * i for i, (label, _, _) in enumerate(rows)}
    runs_folder.suite(
        "study",
        rows,
        [(name, name) for name in levels],
        lambda row, column, seed: levels[column] + gain[row] + 0.001 * seed,
        title=f"Study {HOSTILE}",
        kind="study",
        note=HOSTILE,
    )
    runs_folder.suite(
        "cacr-table6",
        [("SimCLR (CL)", "infonce", None), ("CACR (K=1)", "cacr(k=1)", "SimCLR (CL)")],
        [("CIFAR-10", "vision"), ("STL-10", "vision")],
        lambda row, column, seed: 0.8 + 0.001 * seed,
        published="cacr-table6",
        protocol={"dataset": HOSTILE},
    )
    runs_folder.record(objective=HOSTILE, name=HOSTILE, status="failed", error=HOSTILE)
    (runs_folder.path / "<b>foreign.txt").write_text("not a run")
    write_report(runs_folder.path, tmp_path / "report.html")
    browser.open((tmp_path / "report.html").as_uri())
    return browser


def column(browser, table, index):
    script = """
      const rows = document.querySelector(`table[data-name="${arguments[0]}"]`).tBodies[0].rows;
      return [...rows].filter(row => !row.hidden).map(row => row.cells[arguments[1]].firstChild.textContent.trim());
    """
    return browser.run(script, table, index)


def test_opens_without_errors_and_without_any_request(page, tmp_path):
    assert page.log() == []
    assert page.run("return performance.getEntriesByType('resource').length") == 0
    assert page.run("return document.querySelectorAll('figure.chart svg').length") > 10
    # The study, the table, all printed tables, the run outside of suites, the foreign file.
    assert page.run("return document.querySelectorAll('section').length") == 5


def test_hostile_names_are_text_and_nothing_else(page):
    assert page.run("return window.pwned === undefined")
    assert page.run("return document.querySelectorAll('img, script').length") == 1
    assert page.run("return document.body.innerText.includes('{{7*7}}=1+1|</td>')")
    assert page.run("return document.querySelectorAll('main b').length") == 0


def test_sorts_by_number_and_back(page):
    click = "document.querySelectorAll('table[data-name=study-small-results] th button')[1].click()"
    page.run(click)
    values = [float(text.split()[0]) for text in column(page, "study-small-results", 1)]
    assert values == sorted(values)
    assert len(values) == 4
    page.run(click)
    assert [float(text.split()[0]) for text in column(page, "study-small-results", 1)] == values[::-1]
    state = "return document.querySelector('table[data-name=\"study-small-results\"] th[aria-sort]').ariaSort"
    assert page.run(state) == "descending"


def test_empty_cells_sort_last_both_ways(page):
    click = "document.querySelectorAll('table[data-name=study-small-ranking] th button')[5].click()"
    for _ in range(2):
        page.run(click)
        assert column(page, "study-small-ranking", 0)[-1] == "infonce"


def test_filters_rows_by_words(page):
    script = """
      const table = document.querySelector('table[data-name="study-small-runs"]');
      const input = table.closest('details').querySelector('input');
      input.value = arguments[0]; input.dispatchEvent(new Event('input'));
      return input.nextSibling.textContent;
    """
    assert page.run(script, "CACR") == "9 of 36 rows"
    assert set(column(page, "study-small-runs", 0)) == {"cacr"}
    page.run(script, "")
    assert len(column(page, "study-small-runs", 0)) == 36


def test_theme_button_changes_the_colours(page):
    colour = "return getComputedStyle(document.body).backgroundColor"
    before = page.run(colour)
    page.run("document.querySelector('.theme').click()")
    assert page.run(colour) != before
    assert page.log() == []


def test_a_phone_shows_it_without_sideways_scrolling(page, tmp_path):
    phone = Chromium(size=(390, 844))
    try:
        phone.open((tmp_path / "report.html").as_uri())
        assert phone.run("return innerWidth") == 390
        assert phone.run("return document.documentElement.scrollWidth") <= 390
        assert phone.log() == []
    finally:
        phone.close()


def test_works_without_scripts(page, runs_folder, tmp_path):
    """Served with a policy that forbids all scripts, every table and picture is still there."""
    text = (tmp_path / "report.html").read_bytes()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Security-Policy", "script-src 'none'")
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        page.open(f"http://127.0.0.1:{server.server_port}/")
        assert page.run("return document.querySelectorAll('.theme, .filter, th button').length") == 0
        assert len(column(page, "study-small-results", 0)) == 4
        assert page.run("return document.querySelector('figure.chart svg').getBoundingClientRect().width") > 100
    finally:
        server.shutdown()
        page.log()
