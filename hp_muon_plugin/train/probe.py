"""Whether a folder can be written to, found out without making it: several ranks may ask at once."""

import errno
import os
import tempfile
from pathlib import Path


def probe_folder(folder: Path) -> None:
    """Make a file without a name in a folder, or in the nearest one above that is there.

    Args:
        folder: Where something is to be written later.

    Raises:
        OSError: If that cannot be; names the part of the path that could not be made or written to.
    """
    above = [folder, *folder.parents]
    standing = next(place for place in above if place.exists())
    first = above[max(0, above.index(standing) - 1)]
    if not standing.is_dir():
        code = errno.EEXIST if standing == folder else errno.ENOTDIR
        raise OSError(code, os.strerror(code), str(first))
    try:
        with tempfile.TemporaryFile(dir=standing):
            pass
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(first)) from None
