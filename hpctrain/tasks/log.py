"""The log of a task: scalars and media."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias

from torch import Tensor

MediumKind: TypeAlias = Literal["image", "text", "histogram", "figure", "audio", "table"]


class TaskLog:
    """Logs scalars and media from `Task.loss` and `Task.evaluate`, as `train/NAME` and `eval/NAME`.

    Outside of training, a task has an object of this class, which discards everything. During training, the trainer
    replaces it by one that logs. DataLoader workers and copies of the task again have one that discards everything.

    Scalars are means over samples and ranks. Everything else is a medium, and comes from rank zero alone; calls on
    other ranks have no effect. Media of `loss` belong to the step that is being computed, and media of `evaluate` to
    the last completed step, as in `metrics.jsonl`. If a step logs a name several times, the last value is kept. Tensors
    are copied during the call, without waiting for the device. A mistake in a call raises a TaskError.

    Attributes:
        will_record: whether hpctrain writes a record after this step; in `loss`, test it before you make media. Always
            true in `evaluate`, even in the trial before the first step, so that mistakes show early; false in all other
            passes whose log is discarded. The same on all ranks.
    """

    @property
    def will_record(self) -> bool:
        """Whether a record of metrics follows this step."""
        return False

    def scalar(self, name: str, value: Tensor | float, *, count: Tensor | float | None = None) -> None:
        """Log the mean of a value over samples.

        In `loss`, it is averaged over the window between two records, in `evaluate` over all held-out samples; in both
        over the ranks.

        Args:
            name: logged as `train/NAME` or `eval/NAME`.
            value: a number, or a tensor with one element and without dimensions: the mean over `count`.
            count: how many values it is the mean of, such as tokens; None for the number of the batch's samples.
                With a count of 0, `value` may be NaN and isn't added.

        Raises:
            TaskError: the value isn't a scalar, or hpctrain itself logs this name.
        """

    def image(self, name: str, image: Any) -> None:
        """Log an image as PNG.

        Args:
            name: logged as `train/NAME` or `eval/NAME`.
            image: a tensor or array of shape [H, W], [C, H, W] or [H, W, C], with C of 1, 3 or 4, uint8, bool or
                floats from 0 to 1. A batch, [N, C, H, W] or [N, H, W, C], becomes a grid.

        Raises:
            TaskError: it has another shape or dtype.
        """
        self._media("image", name, image)

    def text(self, name: str, text: str) -> None:
        """Log a text; TensorBoard shows it as Markdown.

        Args:
            name: logged as `train/NAME` or `eval/NAME`.
            text: of any length.
        """
        self._media("text", name, text)

    def histogram(self, name: str, values: Any, *, bins: int = 64) -> None:
        """Log how values are distributed; NaN and infinities are left out.

        Args:
            name: logged as `train/NAME` or `eval/NAME`.
            values: a tensor or array of numbers, of any shape. All of them are copied to the host.
            bins: of equal width, from the smallest to the largest value.

        Raises:
            TaskError: they aren't real numbers.
        """
        self._media("histogram", name, values, bins=bins)

    def figure(self, name: str, figure: Any) -> None:
        """Log a figure as PNG. It is drawn at once, since it may be changed or closed afterwards.

        Args:
            name: logged as `train/NAME` or `eval/NAME`.
            figure: matplotlib's, or any object with a `savefig(file, format="png")`.

        Raises:
            TaskError: it has no `savefig`.
        """
        self._media("figure", name, figure)

    def audio(self, name: str, audio: Any, *, sample_rate: int) -> None:
        """Log a sound as WAV, 16 bits.

        Args:
            name: logged as `train/NAME` or `eval/NAME`.
            audio: a tensor or array of shape [samples] or [channels, samples], int16 or floats from -1 to 1.
            sample_rate: in Hz.

        Raises:
            TaskError: it has another shape or dtype.
        """
        self._media("audio", name, audio, sample_rate=sample_rate)

    def table(self, name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Log a table.

        Args:
            name: logged as `train/NAME` or `eval/NAME`.
            columns: their titles.
            rows: each with one value per column: strings, numbers, None, or tensors with one element.

        Raises:
            TaskError: a row has another length.
        """
        self._media("table", name, rows, columns=columns)

    def _media(self, kind: MediumKind, name: str, content: Any, **options: Any) -> None:
        """Take one medium."""

    def __reduce__(self) -> tuple[type[TaskLog], tuple[()]]:
        # what logs belongs to one process: copies and DataLoader workers get one that discards
        return TaskLog, ()
