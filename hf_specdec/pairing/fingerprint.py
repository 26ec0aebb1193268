"""Tell tokenizers apart by what they do: the tokens behind the ids, special ones, and how a few texts are split."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from hf_specdec.errors import InvalidPairingError, in_short

# Padding is left out: it never reaches the text, and many set its token by hand.
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "cls_token", "mask_token")
PROBES = (
    "Hello world, this isn't  a test.",
    " leading and trailing ",
    "def f(x):\n    return x ** 2  # 1234567890\n\t\n",
    "ÀÉÎõü ﬁ ① Å Å",
    "日本語のテキスト и русский, 🙂👩‍👩‍👧",
    "https://example.org/?a=1&b=%20 <b>CamelCase</b> snake_case",
)
"""Case, contractions, runs of blanks, line ends, digits, composed and compatibility characters, scripts, emoji."""

_FORMAT = 1


def fingerprint(tokenizer: Any) -> str:
    """Return "sha256:…" over what a tokenizer does with ids and texts.

    Two tokenizers with one fingerprint put the same token behind every id, agree on the special ones, and split texts
    alike as far as probes tell. How a tokenizer is stored is left out on purpose: versions of transformers and of
    tokenizers write the same one differently, and slow ones write nothing. So are the padding and the chat template,
    which say nothing about ids.

    Args:
        tokenizer: A tokenizer of transformers, fast or slow.

    Raises:
        InvalidPairingError: It is none.
    """
    try:
        vocabulary = sorted((int(index), str(token)) for token, index in tokenizer.get_vocab().items())
        roles = {name: _id_of(tokenizer, name) for name in ROLES}
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = sorted(int(index) for index, token in added.items() if getattr(token, "special", False))
        probes = [list(map(int, tokenizer(text, add_special_tokens=False)["input_ids"])) for text in PROBES]
    except Exception as error:  # anything could have been passed, and tokenizers of others may do anything
        raise InvalidPairingError(
            f"A fingerprint is taken of a tokenizer of transformers, but {type(tokenizer).__name__} does not behave "
            f"like one ({in_short(error)}). Load it with `AutoTokenizer.from_pretrained`."
        ) from error
    text = json.dumps([_FORMAT, vocabulary, roles, special, probes], ensure_ascii=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _id_of(tokenizer: Any, role: str) -> int | None:
    token = getattr(tokenizer, role, None)
    return None if token is None else int(tokenizer.convert_tokens_to_ids(str(token)))
