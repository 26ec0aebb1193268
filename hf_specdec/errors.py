"""Every exception and warning of the package, one tree.

    Exception
    └── SpecDecError
        ├── InvalidConfigError          (also a ValueError)
        ├── UnsupportedGenerationError  (also a ValueError)
        ├── IncompatibleDraftError      (also a ValueError)
        ├── DraftLoadError              (also an OSError)
        └── DraftFailedError            (also a RuntimeError)

    UserWarning
    └── SpeculationWarning

Each error also inherits the builtin that fits, so `except ValueError` around `generate` keeps working. Messages give
the rule, the value received and the remedy, in that order.
"""


class SpecDecError(Exception):
    """Base of every error this package raises on purpose."""


class InvalidConfigError(SpecDecError, ValueError):
    """A setting has a wrong name, type or value."""


class UnsupportedGenerationError(SpecDecError, ValueError):
    """The requested kind of generation cannot be combined with a draft; raised before any work is done."""


class IncompatibleDraftError(SpecDecError, ValueError):
    """Draft and target do not belong together, for example because their token ids mean different things."""


class DraftLoadError(SpecDecError, OSError):
    """The draft could not be found or read."""


class DraftFailedError(SpecDecError, RuntimeError):
    """The draft failed during generation; raised only with `strict=True`, otherwise plain decoding takes over."""


class SpeculationWarning(UserWarning):
    """Speculation was switched off or will not help; the generated text is unaffected."""
