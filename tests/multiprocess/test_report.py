"""Reports in Chromium at three widths: nothing leaves the page, no text is too small; and pages of bounded size."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess

import pytest

from hpctrain.report.page import POLICY
from hpctrain.report.run_page import run_page
from hpctrain.report.sweep_page import sweep_page
from hpctrain.run.directory import RunDirectory
from hpctrain.status.runs import find_runs
from tests.benchmarks.report import config_text, make_run, make_sweep

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WIDTHS = (360, 820, 1400)
SMALLEST_PX = 11
"""Font size of any text, as the screen shows it."""
MEASURE = """
<script>
for (const one of document.querySelectorAll("details")) one.open = true;
const width = document.documentElement.clientWidth;
const inner = one => one.closest(".scroll, figure.wide") && !one.matches(".scroll, figure.wide");
const outside = [], small = [], cut = [];
for (const one of document.body.querySelectorAll("*")) {
  const box = one.getBoundingClientRect();
  const where = one.tagName + "." + (one.getAttribute("class") || "") + " " + one.textContent.slice(0, 40);
  if (box.width && !inner(one) && (box.right > width + 0.5 || box.left < -0.5)) outside.push(where);
  if (one.tagName == "text") {
    const frame = one.ownerSVGElement.getBoundingClientRect();
    if (box.left < frame.left - 1 || box.right > frame.right + 1) cut.push(where);
    if (12 * one.getScreenCTM().a < SMALLEST) small.push(where);
  } else if (one.childNodes.length && parseFloat(getComputedStyle(one).fontSize) < SMALLEST) small.push(where);
}
const found = {width, scroll: document.documentElement.scrollWidth, outside, small, cut};
parent.document.getElementById("found").textContent = JSON.stringify(found);
</script>
""".replace("SMALLEST", str(SMALLEST_PX))
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The pages of a run of 100,000 records and of a sweep of 500 runs."""
    folder = tmp_path_factory.mktemp("report")
    run = make_run(folder / "run", 100_000, 20, config_text(), {})
    home = make_sweep(folder / "sweep", 500)
    return {"run": run_page(RunDirectory.at(run.path)), "sweep": sweep_page(home, find_runs(home))}


@pytest.mark.parametrize(("name", "most"), [("run", 150_000), ("sweep", 600_000)])
def test_a_page_has_a_bounded_size(pages, name, most):
    assert len(pages[name].encode()) < most


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium isn't installed: apt-get install chromium")
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["run", "sweep"])
def test_nothing_leaves_the_page(pages, name, width, tmp_path):
    assert POLICY in pages[name]
    # the page itself forbids scripts
    measured = re.sub(r"<meta http-equiv=[^>]*>", "", pages[name]).replace("</body>", f"{MEASURE}</body>")
    # a window is at least 500 px wide: a frame isn't
    frame = f'<iframe style="border:0;width:{width}px;height:900px" srcdoc="{html.escape(measured)}"></iframe>'
    page = tmp_path / "page.html"
    page.write_text(f'<!DOCTYPE html><meta charset="utf-8"><pre id="found"></pre>{frame}')
    options = [*OPTIONS, f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1600,1000", "--dump-dom"]
    assert CHROMIUM is not None
    command = [CHROMIUM, *options, f"file://{page}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    (text,) = re.findall(r'<pre id="found">(.*?)</pre>', done.stdout)
    found = json.loads(html.unescape(text))
    assert found == {"width": width, "scroll": width, "outside": [], "small": [], "cut": []}
