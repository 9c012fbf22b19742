"""Names of scalars and arrays: what they may be, and how they become file names."""

import hashlib
from urllib.parse import quote

from gramscope.base.errors import InputError

# Long enough for deep module paths, and with a suffix still below the 255 bytes that file systems allow.
_LONGEST_FILE_NAME = 180
# The array by which a resumed run knows its probe and model: the writers of runs fill it, reports do not draw it.
FINGERPRINT = "start/fingerprint"
SKIPPED = "skipped"  # how many measures the time budget left out at a step: the watcher's own bookkeeping
# Facts of the set-up, which do not change: the diagnosis says what of them matters, and nobody draws them.
FACTS = (
    "probe", "optimizer", "frozen", "not_optimized", "precision", "training_mode", "dropout", "outputs",
    "saturated_gates",
)  # fmt: skip


def check_name(name: object, what: str) -> str:
    """``name`` if it can be stored: any text that is not empty and has a UTF-8 form.

    >>> check_name("share/0.weight", "a scalar")
    'share/0.weight'
    """
    if not isinstance(name, str) or not name:
        raise InputError(f"the name of {what} must be a string that is not empty, got {name!r}. Name it, e.g. 'loss'.")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise InputError(
            f"the name of {what} must have a UTF-8 form, got {name!a} with half a surrogate pair. Rename it."
        ) from None
    return name


def file_name(name: str) -> str:
    """``name`` as a file name that stays in its directory, whatever the name says; distinct names stay distinct.

    All but ASCII letters, digits, ``-``, ``_`` and ``.`` is percent-encoded (``urllib.parse.unquote`` undoes it), a
    leading dot too; a long name is cut and ends in a hash of the whole.

    >>> file_name("share/0.weight"), file_name("../../etc/passwd"), file_name(".."), file_name("Σ λ")
    ('share%2F0.weight', '%2E.%2F..%2Fetc%2Fpasswd', '%2E.', '%CE%A3%20%CE%BB')
    >>> len(file_name("x" * 10_000))
    180
    """
    encoded = quote(check_name(name, "a file"), safe="").replace("~", "%7E")
    if encoded.startswith("."):
        encoded = "%2E" + encoded[1:]
    if len(encoded) > _LONGEST_FILE_NAME:
        # '~' is never left by the encoding, so that no short name can equal a cut one.
        digest = hashlib.sha256(name.encode()).hexdigest()[:32]
        encoded = f"{encoded[: _LONGEST_FILE_NAME - 33]}~{digest}"
    return encoded
