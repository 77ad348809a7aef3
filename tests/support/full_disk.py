"""A disk that is full, imitated by a limit on the size of files."""

import contextlib
import resource


@contextlib.contextmanager
def full_disk(limit_bytes):
    """Every file of this process ends at ``limit_bytes``: writes beyond fail, those across it are cut short."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
