"""Who decides how many tokens the next round drafts.

Controllers know neither torch nor a clock: times and outcomes reach them inside the records they observe, so a test can
replay any sequence of rounds.

The output stays lossless as long as whether a draft token is verified does not depend on that token itself. Deciding
before it is drawn, from earlier rounds and from the tokens before it in this one, always satisfies this; drawing a
token and then dropping it would not.
"""

from hf_specdec.controller.adaptive import AdaptiveDraftLength
from hf_specdec.controller.fixed import FixedDraftLength
from hf_specdec.controller.protocol import DraftLengthController, Outlook

__all__ = ["AdaptiveDraftLength", "DraftLengthController", "FixedDraftLength", "Outlook"]
