"""What `generate` returns with a draft and `return_dict_in_generate=True`."""

from dataclasses import dataclass, fields

from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from hf_specdec.metrics import SpeculationStats


@dataclass
class SpeculativeDecoderOnlyOutput(GenerateDecoderOnlyOutput):
    """A `GenerateDecoderOnlyOutput` that also says how speculation went.

    It comes last, so positions in the tuple form of the host's own fields stay as they are. As there, fields that are
    None are left out of keys and tuple.

    Attributes:
        speculation: Counts, rates and times of this call; None if it decoded without a draft.
    """

    speculation: SpeculationStats | None = None


@dataclass
class SpeculativeEncoderDecoderOutput(GenerateEncoderDecoderOutput):
    """The same for a target with an encoder.

    Attributes:
        speculation: Counts, rates and times of this call; None if it decoded without a draft.
    """

    speculation: SpeculationStats | None = None


def cache_field() -> str:
    """Return the name of the output's cache field, which depends on the version of transformers."""
    names = {field.name for field in fields(GenerateDecoderOnlyOutput)}
    return "cache" if "cache" in names else "past_key_values"
