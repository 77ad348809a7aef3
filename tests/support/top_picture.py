"""Make the picture of docs/how_to/watch_and_compare.md: `top` over runs that this program trains, one of which runs.

python tests/support/top_picture.py docs/how_to/top.svg [--size 110x22]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hpctrain.launch.cancellation import cancel
from hpctrain.run.directory import RunDirectory
from hpctrain.top.app import TopApp
from hpctrain.top.watch import Watch

TRAIN = [sys.executable, "-m", "hpctrain", "trainer.max_steps=300", "logger.every_steps=5"]
RATES = "3e-4,1e-3,3e-3,1e-2,3e-2,1e-1"
LONG = ["trainer.max_steps=20000", "name=longer", "run_dir=runs/longer"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--size", default="110x22")
    options = parser.parse_args()
    columns, lines = map(int, options.size.split("x"))
    picture = options.picture.absolute()
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        sweep = [*TRAIN, "-m", f"optimizer.lr={RATES}", "hydra.sweep.dir=runs/sweep"]
        subprocess.run(sweep, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        interrupted = subprocess.Popen([*TRAIN, *LONG], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        running = [*TRAIN, *LONG[:-1], "run_dir=runs/again"]
        with subprocess.Popen(running, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            wait_for(Path("runs/longer/metrics.jsonl"))
            wait_for(Path("runs/again/metrics.jsonl"))
            time.sleep(8)
            interrupted.terminate()
            interrupted.wait()
            asyncio.run(draw(picture, (columns, lines)))
            cancel(RunDirectory.at("runs/again"))
            process.wait()


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not (path.exists() and path.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.1)


async def draw(picture: Path, size: tuple[int, int]) -> None:
    app = TopApp(Watch(Path("runs")))
    async with app.run_test(size=size) as pilot:
        await asyncio.sleep(6)
        await pilot.press("down")
        await pilot.pause()
        picture.write_text(app.export_screenshot(title="python -m hpctrain top"))


if __name__ == "__main__":
    main()
