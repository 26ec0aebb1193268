"""Faster `generate` for Hugging Face transformers: a draft proposes, the target verifies, the text stays the same."""

from hf_specdec.config import SpeculativeConfig
from hf_specdec.controller import AdaptiveDraftLength, DraftLengthController, FixedDraftLength, Outlook
from hf_specdec.errors import (
    DraftFailedError,
    DraftLoadError,
    IncompatibleDraftError,
    InvalidConfigError,
    InvalidPairingError,
    PairingNotFoundError,
    SpecDecError,
    SpeculationWarning,
    UnsupportedGenerationError,
)
from hf_specdec.generation import SpeculativeGenerationMixin, disable, enable, generate
from hf_specdec.metrics import ProbeRecord, RoundRecord, SpeculationStats
from hf_specdec.outputs import SpeculativeDecoderOnlyOutput, SpeculativeEncoderDecoderOutput
from hf_specdec.pairing.schema import DraftPairing

__version__ = "0.1.0"

__all__ = [
    "AdaptiveDraftLength",
    "DraftFailedError",
    "DraftLengthController",
    "DraftLoadError",
    "DraftPairing",
    "FixedDraftLength",
    "IncompatibleDraftError",
    "InvalidConfigError",
    "InvalidPairingError",
    "Outlook",
    "PairingNotFoundError",
    "ProbeRecord",
    "RoundRecord",
    "SpecDecError",
    "SpeculationStats",
    "SpeculationWarning",
    "SpeculativeConfig",
    "SpeculativeDecoderOnlyOutput",
    "SpeculativeEncoderDecoderOutput",
    "SpeculativeGenerationMixin",
    "UnsupportedGenerationError",
    "disable",
    "enable",
    "generate",
]
