"""Names of files that usually hold passwords, keys or tokens: a run may be read by more users than these files.

The names are those that git templates ignore and secret scanners look for (github/gitignore, gitleaks, detect-secrets).
"""

from __future__ import annotations

import fnmatch
import re

FILES = (
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
PATHS = (
    ".docker/config.json",
    "containers/auth.json",
    "huggingface/token",
    "huggingface/stored_tokens",
    "gh/hosts.yml",
)
"""Ends of paths."""
FOLDERS = (
    ".aws",
    ".azure",
    ".gcloud",
    ".config/gcloud",
    ".gnupg",
    ".huggingface",
    ".kaggle",
    ".kube",
    ".oci",
    ".secrets",
    ".ssh",
)
"""Folders of which every file counts."""
CODE = (
    *(".py", ".pyi", ".pyx", ".ipynb", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".rs", ".go", ".js", ".ts"),
    *(".java", ".md", ".rst", ".example", ".sample", ".template", ".dist", ".j2", ".env.defaults"),
)
"""Ends of names of code, texts, and samples without values, whatever else the names say."""
SAMPLE = re.compile(r"\.(example|sample|template)\.")


def secret_part(path: str) -> str:
    """Return the part of a file's path whose name is usual for secrets, a folder or the whole path; else nothing.

    Args:
        path: relative.
    """
    if folder := secret_folder(path):
        return folder
    lower = path.lower()
    name = lower.rpartition("/")[2]
    if name.endswith(CODE) or SAMPLE.search(name):
        return ""
    return path if _FILES.fullmatch(name) or f"/{lower}".endswith(_PATHS) else ""


def secret_folder(path: str) -> str:
    """Return the first part of a path that is a folder for secrets; else nothing."""
    lower = path.lower()
    if not lower.startswith(".") and "/." not in lower:  # as almost always
        return ""
    found = _FOLDERS.match(lower)
    return path[: found.end("folder")] if found else ""


_FILES = re.compile("|".join(map(fnmatch.translate, FILES)))
_PATHS = tuple(f"/{path}" for path in PATHS)
_FOLDERS = re.compile(rf"(?P<folder>(?:.*?/)?(?:{'|'.join(map(re.escape, FOLDERS))}))(?:/|\Z)", re.DOTALL)
