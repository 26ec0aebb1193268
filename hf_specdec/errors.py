"""Every exception and warning of the package, one tree.

    Exception
    └── SpecDecError
        ├── InvalidConfigError          (also a ValueError)
        ├── UnsupportedGenerationError  (also a ValueError)
        ├── IncompatibleDraftError      (also a ValueError)
        ├── InvalidPairingError         (also a ValueError)
        ├── PairingNotFoundError        (also an OSError)
        ├── DraftLoadError              (also an OSError)
        └── DraftFailedError            (also a RuntimeError)

    UserWarning
    └── SpeculationWarning

Each error also inherits the builtin that fits, so `except ValueError` around `generate` keeps working. Messages give
the rule, the value received and the remedy, in that order.
"""

from __future__ import annotations

import sys
import warnings


class SpecDecError(Exception):
    """Base of every error this package raises on purpose."""


class InvalidConfigError(SpecDecError, ValueError):
    """A setting has a wrong name, type or value."""


class UnsupportedGenerationError(SpecDecError, ValueError):
    """The requested kind of generation cannot be combined with a draft; raised before any work is done."""


class IncompatibleDraftError(SpecDecError, ValueError):
    """Draft and target do not belong together, for example because their token ids mean different things."""


class InvalidPairingError(SpecDecError, ValueError):
    """A draft pairing breaks a rule: a field, a file of its folder, or what they say of each other."""


class PairingNotFoundError(SpecDecError, OSError):
    """No draft pairing could be found or fetched; the message says where it was looked for."""


class DraftLoadError(SpecDecError, OSError):
    """The draft could not be found or read."""


class DraftFailedError(SpecDecError, RuntimeError):
    """The draft failed during generation; raised only with `strict=True`, otherwise plain decoding takes over."""


class SpeculationWarning(UserWarning):
    """Speculation was switched off or will not help; the generated text is unaffected."""


def warn_caller(message: str) -> None:
    """Warn with a `SpeculationWarning` that names the caller's line, however deep in the host's wrappers we are."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _is_inside(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, SpeculationWarning, stacklevel=level)


def in_short(error: BaseException) -> str:
    """Return an error's type and the first line of what it says; messages of the host can fill pages."""
    first_line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first_line}"


def _is_inside(module: str) -> bool:
    return module.partition(".")[0] in {
        "hf_specdec",
        "transformers",
        "transformers_modules",
        "torch",
        "peft",
        "contextlib",
    }
