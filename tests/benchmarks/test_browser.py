"""The report in headless Chromium, driven over plain HTTP (the WebDriver protocol)."""

import json
import shutil
import socket
import subprocess
import urllib.request
from contextlib import closing, contextmanager, suppress

import pytest

from dipole.benchmarks.report.write import write_report
from tests.benchmarks.conftest import RunsFolder, wait_for

HOSTILE = '<img src=x onerror="window.pwned=1"><script>window.pwned=1</script>\'"`{{7*7}}=1+1|</td>'
DRIVER = shutil.which("chromedriver")
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MISSING = "needs Chromium: apt-get install chromium chromium-driver"
pytestmark = pytest.mark.skipif(not (DRIVER and BROWSER), reason=MISSING)


class Chromium:
    """One browser session."""

    def __init__(self):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.driver = subprocess.Popen([DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.base = f"http://127.0.0.1:{port}"
        wait_for(self._is_ready, "chromedriver", 30)
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1280,900"]
        options = {"binary": BROWSER, "args": flags}
        capabilities = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        session = self._call("POST", "/session", {"capabilities": {"alwaysMatch": capabilities}})
        self.base += f"/session/{session['sessionId']}"

    def open(self, url):
        self._call("POST", "/url", {"url": url})

    def run(self, script, *arguments):
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def log(self):
        return self._call("POST", "/se/log", {"type": "browser"})

    def command(self, name, parameters):
        """A command of the DevTools protocol."""
        return self._call("POST", "/goog/cdp/execute", {"cmd": name, "params": parameters})

    @contextmanager
    def sized(self, width, height):
        """Lay out pages for a window or a phone of this size."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.command("Emulation.setDeviceMetricsOverride", metrics)
        try:
            yield
        finally:
            self.command("Emulation.clearDeviceMetricsOverride", {})

    def close(self):
        try:
            self._call("DELETE", "", None)
        finally:
            self.driver.terminate()
            self.driver.wait()

    def until(self, script):
        """Wait until a script returns a true value."""
        wait_for(lambda: self.run(script), script, 20)

    def _is_ready(self):
        with suppress(OSError):
            return self._call("GET", "/status", None)["ready"]
        return False

    def _call(self, method, path, body):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]


@pytest.fixture(scope="module")
def browser():
    with closing(Chromium()) as found:
        yield found


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A report with a study, a paper's table, hostile names everywhere a user can write one."""
    folder = tmp_path_factory.mktemp("study")
    runs_folder = RunsFolder(folder / "runs")
    levels = {"vision": 0.9, "text": 0.6, "rl": 0.4}
    rows = [("infonce", "infonce", None), *((name, name, "infonce") for name in (HOSTILE, "hcl", "cacr"))]
    gain = {label: 0.01 * i for i, (label, _, _) in enumerate(rows)}
    more = {"title": f"Study {HOSTILE}", "kind": "study", "note": HOSTILE}
    columns = [(name, name) for name in levels]
    runs_folder.suite("study", rows, columns, lambda r, c, s: levels[c] + gain[r] + 0.001 * s, (0, 1), **more)
    rows = [("SimCLR (CL)", "infonce", None), ("CACR (K=1)", "cacr(k=1)", "SimCLR (CL)")]
    columns, more = (
        [("CIFAR-10", "vision"), ("STL-10", "vision")],
        {"protocol": {"dataset": HOSTILE}, "show": ["curves", "columns"]},
    )
    runs_folder.suite("cacr-table6", rows, columns, lambda r, c, s: 0.8 + s / 1e3, published="cacr-table6", **more)
    runs_folder.record(objective=HOSTILE, name=HOSTILE, status="failed", error=HOSTILE)
    (runs_folder.path / "<b>foreign.txt").write_text("not a run")
    write_report(runs_folder.path, folder / "report.html")
    return folder / "report.html"


@pytest.fixture
def page(browser, report):
    """The report opened from the disk."""
    browser.open(report.as_uri())
    return browser


def column(browser, table, index):
    script = """
      const rows = document.querySelector(`table[data-name="${arguments[0]}"]`).tBodies[0].rows;
      return [...rows].filter(row => !row.hidden).map(row => row.cells[arguments[1]].firstChild.textContent.trim());
    """
    return browser.run(script, table, index)


def test_opens_without_errors_or_requests_and_shows_hostile_names_as_text(page):
    assert page.log() == []
    assert page.run("return performance.getEntriesByType('resource').length") == 0
    assert page.run("return document.querySelectorAll('figure.chart svg').length") > 10
    # The study, the table, all printed tables, the run outside of suites, the foreign file.
    assert page.run("return document.querySelectorAll('section').length") == 5
    assert page.run("return window.pwned === undefined")
    assert page.run("return document.querySelectorAll('img, script').length") == 1
    assert page.run("return document.body.innerText.includes('{{7*7}}=1+1|</td>')")
    assert page.run("return document.querySelectorAll('main b').length") == 0


def test_sorts_by_number_and_back_with_empty_cells_last(page):
    click = "document.querySelectorAll('table[data-name=study-small-results] th button')[1].click()"
    page.run(click)
    values = [float(text.split()[0]) for text in column(page, "study-small-results", 1)]
    assert values == sorted(values)
    assert len(values) == 4
    page.run(click)
    assert [float(text.split()[0]) for text in column(page, "study-small-results", 1)] == values[::-1]
    state = "return document.querySelector('table[data-name=\"study-small-results\"] th[aria-sort]').ariaSort"
    assert page.run(state) == "descending"
    click = "document.querySelectorAll('table[data-name=study-small-ranking] th button')[5].click()"
    for _ in range(2):
        page.run(click)
        assert column(page, "study-small-ranking", 0)[-1] == "infonce"


def test_filters_rows_by_words_and_a_button_changes_the_colours(page):
    script = """
      const table = document.querySelector('table[data-name="study-small-runs"]');
      const input = table.closest('details').querySelector('input');
      input.value = arguments[0]; input.dispatchEvent(new Event('input'));
      return input.nextSibling.textContent;
    """
    assert page.run(script, "CACR") == "6 of 24 rows"
    assert set(column(page, "study-small-runs", 0)) == {"cacr"}
    page.run(script, "")
    assert len(column(page, "study-small-runs", 0)) == 24
    colour = "return getComputedStyle(document.body).backgroundColor"
    before = page.run(colour)
    page.run("document.querySelector('.theme').click()")
    assert page.run(colour) != before
    assert page.log() == []


def test_works_without_scripts(browser, report):
    """Every table and picture is still there."""
    browser.command("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.open(report.as_uri())
        assert browser.run("return document.querySelectorAll('.theme, .filter, th button').length") == 0
        assert len(column(browser, "study-small-results", 0)) == 4
        assert browser.run("return document.querySelector('figure.chart svg').getBoundingClientRect().width") > 100
    finally:
        browser.command("Emulation.setScriptExecutionDisabled", {"value": False})


# Every text of a picture inside the picture's box, and every picture inside its section, to 1 px of rounding.
CLIPPED = """
  const outside = [];
  for (const svg of document.querySelectorAll('figure.chart svg')) {
    const box = svg.getBoundingClientRect(), room = svg.closest('section').getBoundingClientRect();
    if (box.width < 100 || box.right > room.right + 1) outside.push('picture: ' + svg.getAttribute('aria-label'));
    for (const text of svg.querySelectorAll('text')) {
      const at = text.getBoundingClientRect(), next = text.nextSibling?.getBoundingClientRect?.() ?? {};
      if (at.width && (at.left < box.left - 1 || at.right > box.right + 1 || at.bottom > box.bottom + 1)
          || at.top == next.top && at.left < next.left && at.right > next.left && !text.outerHTML.includes('rotate'))
        outside.push(text.textContent);
    }
  }
  return outside;
"""
# Cut off for a reader: a table wider than its box, a text wider than its cell, a page wider than the window.
CUT = """
  const cut = [...document.querySelectorAll('.scroll, td')].filter(box => box.scrollWidth > box.clientWidth + 1
    && (arguments[0] || getComputedStyle(box).overflowX !== 'auto')).map(box => box.ariaLabel ?? box.textContent);
  return document.documentElement.scrollWidth > innerWidth ? [...cut, 'page'] : cut;
"""


@pytest.fixture(scope="module")
def wide_report(tmp_path_factory):
    """Long names, many columns, many rows, runs outside suites: what makes pages too wide."""
    folder = tmp_path_factory.mktemp("wide")
    runs_folder = RunsFolder(folder / "runs")
    long = "infonce(temperature=0.07, symmetric=true, a_very_long_option=1.0)"
    rows = [("infonce", "infonce", None), (long, long, "infonce"), ("hcl", "hcl", "infonce")]
    columns = [(f"a data set of a long name {i}", "vision") for i in range(6)]
    runs_folder.suite("wide", rows, columns, lambda r, c, s: 0.8 + 0.01 * s + len(r) / 1000, title="Wide", kind="study")
    grid = [(f"hcl(temperature={t}, beta={b})",) * 2 + (None,) for t in (0.05, 0.1, 0.2) for b in (0.25, 1, 4)]
    runs_folder.suite(
        "grid", grid, columns[:2], lambda r, c, s: 0.5 + 0.01 * s + len(r) / 100, (0, 1), show=["columns"]
    )
    for objective in ("infonce", long):
        runs_folder.record(objective=objective, results={"knn/accuracy": 0.5 + len(objective) / 1000})
    write_report(runs_folder.path, folder / "wide.html")
    return (folder / "wide.html").as_uri()


@pytest.mark.parametrize("size", [(1400, 900), (390, 844)])
def test_nothing_is_clipped_or_runs_over(browser, wide_report, size):
    with browser.sized(*size):
        browser.open(wide_report)
        assert browser.run("return innerWidth") == size[0]
        assert browser.run(CUT, False) == []
        assert browser.run(CLIPPED) == []
        assert browser.log() == []


def test_paper_has_every_column_and_the_folded_tables(browser, wide_report):
    """Laid out as on A4 less its margins (182 mm: 688 px), with the style of print."""
    browser.open(wide_report)
    with browser.sized(688, 1000):
        browser.command("Emulation.setEmulatedMedia", {"media": "print"})
        browser.run("dispatchEvent(new Event('beforeprint'))")
        assert browser.run("return document.querySelectorAll('details:not([open])').length") == 0
        assert browser.run("return document.querySelectorAll('details').length") > 0
        assert browser.run(CUT, True) == []
        assert browser.run(CLIPPED) == []
        browser.run("dispatchEvent(new Event('afterprint'))")
        assert browser.run("return document.querySelectorAll('details[open]').length") == 0
        browser.command("Emulation.setEmulatedMedia", {"media": ""})


def test_a_chart_under_the_pointer_has_values_and_a_legend_that_selects(browser, wide_report):
    """Vega draws it by its interpreter: the policy forbids to evaluate text, and the log is empty."""
    browser.open(wide_report)
    browser.log()
    script = """
      const box = [...document.querySelectorAll('figure.chart')]
        .find(one => one.querySelectorAll('.role-legend-symbol path').length > 2
          && one.querySelector('svg').getAttribute('aria-label').includes('while training')).querySelector('.drawn');
      window.box = box;
      box.dispatchEvent(new PointerEvent('pointerenter'));
    """
    browser.run(script)
    browser.until("return 'live' in box.dataset")
    opacity = "box.querySelectorAll('.mark-symbol path')].map(path => path.getAttribute('opacity'))"
    opacities = f"return [...new Set([...{opacity})]"
    before = browser.run(opacities)
    browser.run("""
      const symbol = box.querySelector('.role-legend-symbol path'), at = symbol.getBoundingClientRect();
      for (const kind of ['pointerdown', 'pointerup', 'mousedown', 'mouseup', 'click'])
        symbol.dispatchEvent(new MouseEvent(kind, { bubbles: true, clientX: at.x + 3, clientY: at.y + 3 }));
    """)
    browser.until(f"{opacities.replace('return ', 'const now = ')}; return now.length > {len(before)}")
    browser.run("""
      const dot = box.querySelector('.role-mark.mark-symbol path'), at = dot.getBoundingClientRect();
      for (const kind of ['pointerover', 'pointermove', 'mouseover', 'mousemove'])
        dot.dispatchEvent(new MouseEvent(kind, { bubbles: true, clientX: at.x + 3, clientY: at.y + 3 }));
    """)
    browser.until("return document.querySelector('#vg-tooltip-element')?.textContent.includes('training step')")
    assert browser.log() == []


def test_charts_in_a_fold_are_drawn_when_it_is_opened(browser, wide_report):
    """18 losses and 18 histograms: 12 of each are there, the others are drawn by Vega, and all of them fit."""
    browser.open(wide_report)
    browser.log()
    folds = "[...document.querySelectorAll('#wide-small details.more')]"
    assert browser.run(f"return {folds}.map(fold => fold.querySelectorAll('svg').length).join()") == "0,0"
    browser.run(f"for (const fold of {folds}) fold.open = true")
    count = f"{folds}.reduce((sum, fold) => sum + fold.querySelectorAll('figure svg.marks').length, 0)"
    browser.until(f"return {count} === {folds}.reduce((n, fold) => n + fold.querySelectorAll('figure').length, 0)")
    assert browser.run(CLIPPED) == []
    assert browser.log() == []
