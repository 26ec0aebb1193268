"""Constrain the text to a JSON schema with a grammar engine (llguidance), with a draft and without.

It needs `pip install llguidance`, and runs offline:

    python examples/custom_processor_grammar.py
"""

import json

import torch
from transformers import LogitsProcessor

import hf_specdec
from hf_specdec.demo import DEMO_PROMPTS, load_demo_pair

try:
    from llguidance import LLMatcher, hf
    from llguidance.numpy import allocate_token_bitmask, apply_token_bitmask_inplace, fill_next_token_bitmask
except ImportError as error:
    raise SystemExit(f"This example needs llguidance: `pip install llguidance`. ({error})") from error

NAME, LINE = {"type": "string", "pattern": "^[a-z_]{3,16}$"}, {"type": "integer", "minimum": 1, "maximum": 999}
PROPERTIES = {"name": NAME, "line": LINE, "arguments": {"type": "array", "items": NAME, "minItems": 2, "maxItems": 3}}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": [*PROPERTIES], "additionalProperties": False}
BLANKS = r"(\n {4}|\n {6}|\n {8}| )?"  # bounded, so that 300 tokens always suffice


class GrammarProcessor(LogitsProcessor):
    """Leave only the tokens that the grammar allows; make a new one for every call of `generate`."""

    # State is safe: this sees precisely the calls of plain decoding, one per emitted token and in order, and never a
    # draft token that was rejected. Nothing needs to be rolled back.
    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self.matchers: list[LLMatcher] = []  # one per row

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # [B, L], [B, V] -> [B, V]
        """Let every row's matcher read the token that was emitted last, and mask what may not follow."""
        for matcher, token_id in zip(self.matchers, input_ids[:, -1].tolist(), strict=False):
            if not matcher.is_stopped() and not matcher.consume_token(token_id):  # a finished row gets padding
                raise RuntimeError(matcher.get_error())
        self.matchers = self.matchers or [self.matcher.deep_copy() for _ in input_ids]  # first call: no token to read
        bitmask, bias = allocate_token_bitmask(*scores.shape), torch.zeros(scores.shape)
        for row, matcher in enumerate(self.matchers):
            fill_next_token_bitmask(matcher, bitmask, row)
        apply_token_bitmask_inplace(bias.numpy(), bitmask)  # -inf for all that is not allowed
        return scores + bias.to(scores)


def main() -> None:
    """Print a JSON object written by the target alone, by target and draft, and by both with sampling."""
    pair = load_demo_pair(num_parameters=0)
    model = hf_specdec.enable(pair.target)
    tokenizer = hf.from_tokenizer(pair.tokenizer, n_vocab=model.config.vocab_size)
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_pattern": BLANKS}))
    inputs = pair.tokenizer(DEMO_PROMPTS["json"][0].rpartition("{")[0], return_tensors="pt").to(model.device)

    def write(**options: object) -> str:
        output = model.generate(**inputs, max_new_tokens=300, logits_processor=[GrammarProcessor(matcher)], **options)
        return pair.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    plain, drafted = write(do_sample=False), write(do_sample=False, draft_model=pair.draft, num_draft_tokens=3)
    sampled = write(do_sample=True, draft_model=pair.draft, num_draft_tokens=3)
    for title, text in {"greedy, target alone": plain, "greedy, with a draft": drafted, "sampled": sampled}.items():
        print(f"---- {title}\n{text}\nread as JSON: {json.loads(text)}\n")
    print(f"the same greedy text with and without the draft: {plain == drafted}")


if __name__ == "__main__":
    main()
