"""The examples of docs/examples, at a size that tests run."""

from __future__ import annotations

from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
CONF = EXAMPLES / "conf"
NAMES = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
PACKAGES = {"keras_digits": ["keras"], "lora": ["transformers", "peft"], "resnet50": ["PIL"]}
"""By example: packages that the gate may not have."""


def source(name: str) -> Path:
    """The file that a reader copies beside the experiment; the experiment itself if it needs none."""
    program = EXAMPLES / f"{name}.py"
    return program if program.is_file() else CONF / "experiment" / f"{name}.yaml"


def required(name: str, folder: Path) -> list[str]:
    """The words without which an example doesn't compose: files of the user's own, here in ``folder``."""
    words = {
        "distillation": [f"task.teacher={folder}/teacher.pt"],
        "fine_tuning": [f"init_from={folder}/backbone.pt"],
        "gpt": [f"task.data={folder}/tokens"],
        "lora": [f"task.base={folder}/tiny_llama"],
        "resnet50": [f"task.data={folder}/pictures"],
    }
    return ["experiment=" + name, *words.get(name, [])]


TINY = {
    "fine_tuning": ["++task.num_labels=40"],  # unfrozen after 10 steps
    "gan": ["++task.width=8"],
    "gpt": ["model.num_layers=2", "model.num_heads=2", "model.width=32", "model.context_length=32"],
    "replay": ["++task.num_pendulums=4", "++task.capacity=20"],
    "resnet50": ["model.num_classes=2", "task.image_size=32", "trainer.eval_every_steps=6"],
    "vae": ["++task.width=32"],
}
TINY["gpt"] += ["task.context_length=32", "trainer.compile=false", "model.vocab_size=256"]
