"""The folder of a user's code: its commit and diff in git, and the names of files that usually hold secrets."""

from __future__ import annotations

import fnmatch
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TIMEOUT_S = 5.0
LARGEST_DIFF_BYTES = 1_000_000
SAFE = {"core.fsmonitor": "", "core.hooksPath": "/dev/null"}
"""Configuration of git in place of the repository's, which may name programs there."""

# what git templates ignore and secret scanners look for (github/gitignore, gitleaks, detect-secrets)
SECRET_FILES = (
    *(".env", ".env.*", "*.env", ".envrc", ".flaskenv"),
    *(".netrc", "_netrc", ".authinfo*", ".pgpass", ".my.cnf", ".mylogin.cnf", ".htpasswd", "*.htpasswd", ".*_history"),
    *(".git-credentials", ".npmrc", ".yarnrc", ".yarnrc.yml", ".pypirc", ".dockercfg", ".s3cfg", ".boto", ".mcs3cfg"),
    *(".databrickscfg", ".vault-token", ".vault_pass*", "vault_pass*", ".terraformrc", "terraform.rc", "*rclone.conf"),
    *("*.tfvars", "*.tfvars.json", "*.tfstate", "*.tfstate.*", "kubeconfig*", "*.kubeconfig", "kaggle.json"),
    *("*.pem", "*.key", "*.p8", "*.p12", "*.pfx", "*.ppk", "*.jks", "*.keystore", "*.kdb", "*.kdbx", "*.ovpn"),
    *("*.keytab", "krb5cc*", "*.agekey", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "*.secret", "*.secrets"),
    *("*service_account*.json", "*service-account*.json", "*serviceaccount*.json", "*firebase-adminsdk*.json"),
    *("*credential*.json", "credentials", "credentials.*", ".credentials*", "client_secret*", "*api_key*", "*apikey*"),
    *("secret", "secret.*", "secrets", "secrets.*", ".secret*", "*_secrets.*", "password*.txt", "passwords.*"),
    *("token", "token.txt", "token.json", "*.token", ".token", "*hf_token*", "*_token", "*_token.txt"),
)
"""Patterns of names, as in `fnmatch`, in lower case."""
SECRET_PATHS = (
    *("/.docker/config.json", "/containers/auth.json", "/huggingface/token", "/huggingface/stored_tokens"),
    "/gh/hosts.yml",
)
"""Ends of paths."""
SECRET_FOLDERS = (
    *(".aws", ".azure", ".gcloud", ".config/gcloud", ".gnupg", ".huggingface", ".kaggle", ".kube", ".oci", ".secrets"),
    ".ssh",
)
"""Folders of which every file counts."""
NO_SECRETS = (
    *(".py", ".pyi", ".pyx", ".ipynb", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".rs", ".go", ".js", ".ts"),
    *(".java", ".md", ".rst", ".example", ".sample", ".template", ".dist", ".j2", ".env.defaults"),
)
"""Ends of names of code, texts, and samples without values, whatever else the names say."""
SAMPLE = re.compile(r"\.(example|sample|template)\.")
_IS_SECRET_FILE = re.compile("|".join(map(fnmatch.translate, SECRET_FILES)))
_IN_SECRET_FOLDER = re.compile(
    rf"(?P<folder>(?:.*?/)?(?:{'|'.join(map(re.escape, SECRET_FOLDERS))}))(?:/|\Z)", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Answer:
    """Git's answer to a command.

    Attributes:
        output: its standard output; None if it failed.
        problem: why it failed, in one line; empty if it didn't.
    """

    output: bytes | None
    problem: str = ""


def ask_git(
    folder: Path, *arguments: str, instead: Mapping[str, str] | None = None, timeout_s: float | None = None
) -> Answer:
    """Execute git in a folder.

    Args:
        folder: of a repository.
        arguments: the subcommand, which must not write, and its options.
        instead: more configuration in place of the repository's.
        timeout_s: the most seconds to wait; None for `TIMEOUT_S`.
    """
    # options, because git before 2.31 ignores GIT_CONFIG_COUNT
    settings = [part for key, value in {**SAFE, **(instead or {})}.items() for part in ("-c", f"{key}={value}")]
    timeout_s = TIMEOUT_S if timeout_s is None else timeout_s
    # a run must start without git, too, and on a file system where git is slow
    try:
        done = subprocess.run(
            ["git", "--no-pager", *settings, "-C", str(folder), *arguments],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=timeout_s,
            check=False,
            env=_environment(),
        )
    except subprocess.TimeoutExpired:
        return Answer(None, f"git {arguments[0]} took longer than {timeout_s:g} s")
    except (OSError, subprocess.SubprocessError) as error:
        return Answer(None, f"git can't be executed: {error}")
    if done.returncode:
        lines = done.stderr.decode(errors="replace").split("\n")
        return Answer(None, lines[0].removeprefix("fatal: ") or f"git {arguments[0]} failed")
    return Answer(done.stdout)


def _environment() -> dict[str, str]:
    """The environment in which git executes nothing that GIT_* variables name."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return variables | {
        "GIT_OPTIONAL_LOCKS": "0",  # otherwise git writes the index, and runs a hook
        "GIT_ALLOW_PROTOCOL": "none",  # a partial clone fetches what is missing, by a program of its configuration
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "LC_ALL": "C",  # the messages that a caller looks for
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return the commit, the tree and the diff of the repository that contains a folder; None outside of one."""
    names = ask_git(folder, "rev-parse", "HEAD", "HEAD^{tree}").output
    if names is None:
        return None
    commit, tree = names.decode().split()
    filters = _without_filters(folder)
    # a submodule's changes would be asked for with its own configuration, which may name programs, too
    options = ("--no-ext-diff", "--no-textconv", "--no-color", "--ignore-submodules=dirty")
    diff = None if filters is None else _diff(folder, filters, options)
    left_out = diff is None or len(diff) > LARGEST_DIFF_BYTES
    text = "" if diff is None or left_out else diff.decode(errors="replace")
    return {"commit": commit, "tree": tree, "diff": text, "diff_left_out": left_out}


def _diff(folder: Path, filters: Mapping[str, str], options: Sequence[str]) -> bytes | None:
    """The changes since the commit, without those of files whose names are usual for passwords and keys."""
    # the first name of a renamed file counts, too
    names = ask_git(folder, "diff", *options, "--no-renames", "--name-only", "-z", "HEAD", instead=filters).output
    if names is None:
        return None
    changed = os.fsdecode(names).split("\0")[:-1]
    left_out = [f":(top,exclude,literal){path}" for path in changed if secret_part(path)]
    paths = ["--", ":/", *left_out] if left_out else []
    return ask_git(folder, "diff", *options, "HEAD", *paths, instead=filters).output if changed else b""


def _without_filters(folder: Path) -> dict[str, str] | None:
    """Configuration that switches off the filters of this repository, for which git has no option.

    None if that isn't possible: then a diff could execute them.
    """
    keys = ask_git(folder, "config", "-z", "--name-only", "--list").output
    if keys is None:
        return None
    filters = {key.rpartition(".")[0] for key in os.fsdecode(keys).split("\0") if key.startswith("filter.")}
    if any("=" in name for name in filters):
        return None  # for git -c, a key ends at the first =
    values = {"clean": "", "smudge": "", "process": "", "required": "false"}
    return {f"{name}.{key}": value for name in filters for key, value in values.items()}


def secret_part(path: str) -> str:
    """Return the part of a file's path whose name is usual for secrets, a folder or the whole path; else nothing.

    Args:
        path: relative.
    """
    if folder := secret_folder(path):
        return folder
    lower = path.lower()
    name = lower.rpartition("/")[2]
    if name.endswith(NO_SECRETS) or SAMPLE.search(name):
        return ""
    return path if _IS_SECRET_FILE.fullmatch(name) or f"/{lower}".endswith(SECRET_PATHS) else ""


def secret_folder(path: str) -> str:
    """Return the first part of a path that is a folder for secrets; else nothing."""
    lower = path.lower()
    if not lower.startswith(".") and "/." not in lower:  # as almost always
        return ""
    match = _IN_SECRET_FOLDER.match(lower)
    return path[: match.end("folder")] if match else ""
