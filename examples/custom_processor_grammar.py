"""Constrain the text to a JSON schema with a grammar engine (llguidance), with a draft and without; offline.

pip install llguidance
python examples/custom_processor_grammar.py
"""

import json

import torch
from transformers import LogitsProcessor

import hf_specdec
from hf_specdec.demo import DEMO_PROMPTS, load_demo_pair

try:
    from llguidance import LLMatcher, LLTokenizer, hf
    from llguidance.numpy import allocate_token_bitmask, apply_token_bitmask_inplace, fill_next_token_bitmask
except ImportError as error:
    raise SystemExit(f"This example needs llguidance: `pip install llguidance`. ({error})") from error

NAME, LINE = {"type": "string", "pattern": "^[a-z_]{3,16}$"}, {"type": "integer", "minimum": 1, "maximum": 999}
PROPERTIES = {"name": NAME, "line": LINE, "arguments": {"type": "array", "items": NAME, "minItems": 2, "maxItems": 3}}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": [*PROPERTIES], "additionalProperties": False}
BLANKS = r"(\n {4}|\n {6}|\n {8}| )?"  # bounded, or a model could go on with blanks for ever


class GrammarProcessor(LogitsProcessor):
    """Leave only the tokens that the grammar allows; make a new one for every call of `generate`."""

    # State is safe: this sees precisely the calls of plain decoding, one per emitted token and in order, and never a
    # draft token that was rejected. Nothing needs to be rolled back.
    def __init__(self, tokenizer: LLTokenizer, grammar: str) -> None:
        self.tokenizer, self.grammar = tokenizer, grammar
        self.matchers: list[LLMatcher] = []  # one per row

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # [B, L], [B, V] -> [B, V]
        for matcher, token_id in zip(self.matchers, input_ids[:, -1].tolist(), strict=False):
            if not matcher.is_stopped() and not matcher.consume_token(token_id):  # a finished row gets padding
                raise RuntimeError(matcher.get_error())
        if not self.matchers:  # the first call: all tokens so far are the prompt's
            self.matchers = [LLMatcher(self.tokenizer, self.grammar) for _ in input_ids]
        bitmask, bias = allocate_token_bitmask(*scores.shape), torch.zeros(scores.shape)
        for row, matcher in enumerate(self.matchers):
            fill_next_token_bitmask(matcher, bitmask, row)
        apply_token_bitmask_inplace(bias.numpy(), bitmask)  # -inf for all that is not allowed
        return scores + bias.to(scores)


def main() -> None:
    """Print a JSON object written by the target alone, by target and draft, and by both with sampling."""
    pair = load_demo_pair(num_parameters=0)
    hf_specdec.enable(pair.target)
    tokenizer = hf.from_tokenizer(pair.tokenizer, n_vocab=pair.target.config.vocab_size)
    grammar = LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_pattern": BLANKS})
    inputs = pair.tokenizer(DEMO_PROMPTS["json"][0].rpartition("{")[0], return_tensors="pt").to(pair.target.device)

    def write(**options: object) -> str:
        processors = [GrammarProcessor(tokenizer, grammar)]
        output = pair.target.generate(**inputs, max_new_tokens=256, logits_processor=processors, **options)
        return pair.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    plain, drafted = write(do_sample=False), write(do_sample=False, draft_model=pair.draft, num_draft_tokens=3)
    sampled = write(do_sample=True, draft_model=pair.draft, num_draft_tokens=3)
    for title, text in {"greedy, target alone": plain, "greedy, with a draft": drafted, "sampled": sampled}.items():
        print(f"---- {title}\n{text}\nread as JSON: {json.loads(text)}\n")
    print(f"the same greedy text with and without the draft: {plain == drafted}")


if __name__ == "__main__":
    main()
