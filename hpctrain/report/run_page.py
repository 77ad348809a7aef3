"""The page of a run."""

from __future__ import annotations

from hpctrain.phrases import duration
from hpctrain.report.attempt_chart import attempt_chart
from hpctrain.report.curve_charts import curve_charts
from hpctrain.report.markup import Markup, element, joined
from hpctrain.report.origin import code, configuration, environment
from hpctrain.report.page import Section, descriptions, facts, html_page
from hpctrain.report.run_record import RunRecord
from hpctrain.report.scale import number_text
from hpctrain.report.speed_charts import speed_charts
from hpctrain.report.sweep_results import without_secrets
from hpctrain.report.time_chart import time_chart
from hpctrain.run.directory import RunDirectory
from hpctrain.run.manifest import varied_text
from hpctrain.status.run_status import RunStatus


def run_page(directory: RunDirectory) -> str:
    """Return the page of a run, made from its directory, and from SLURM's records of its jobs where SLURM answers.

    Args:
        directory: of the run, which may be training.
    """
    record = RunRecord.read(directory)
    status = record.status
    sections = [
        Section("Curves", curve_charts(record)),
        Section("Attempts", attempt_chart(record)),
        Section("Where the time went", time_chart(status.account.spent, with_ratio=status.knows_step)),
        Section("Speed", speed_charts(record)),
        Section("Configuration", configuration(directory)),
        Section("Code", code(directory)),
        Section("Environment", environment(directory)),
    ]
    return html_page(f"{title_of(directory)} {status.state}", _head(status, title_of(directory)), sections)


def title_of(directory: RunDirectory) -> str:
    """The last two parts of the path: a name and a time, or a sweep and a number."""
    return "/".join(directory.path.parts[-2:])


def _head(status: RunStatus, title: str) -> Markup:
    heading = element("h1", title, " ", element("small", element("span", str(status.state), class_="state")))
    note = element("p", status.note) if status.note else ""
    spent = status.account.spent
    pairs = []
    if status.knows_step:
        total = "" if status.total_steps is None else f" of {number_text(status.total_steps)}"
        pairs.append(("step", f"{status.step}{total}"))
    else:
        pairs.append(("step", "not reported"))
    if status.best is not None:
        pairs.append((f"best {status.best.name}, at step {status.best_step}", f"{status.best.value:.4g}"))
    pairs.append(("attempts", str(len(status.attempts))))
    pairs.append(("wall time", duration(spent.total_s)))
    if status.knows_step and spent.ratio is not None:
        pairs.append(("effective training time ratio", f"{spent.ratio:.2f}"))
    if status.left_s is not None:
        pairs.append(("left, about", duration(status.left_s)))
    last = status.metrics.get("throughput/samples_per_s")
    if last is not None:
        pairs.append(("samples/s, last", number_text(last)))
    about = descriptions(
        [
            ("run", str(status.path)),
            ("program", status.command),
            ("varied", varied_text(without_secrets(status.varied))),
            ("jobs", " ".join(status.job_ids)),
            ("checkpoint", "" if status.checkpoint_step is None else f"step {status.checkpoint_step}"),
            ("gone", "" if status.gone_step is None else f"the checkpoint of step {status.gone_step}"),
            ("damaged", " ".join(status.set_aside)),
            ("warning", status.best_warning),
        ]
    )
    return joined([heading, note, about, facts(pairs)])
