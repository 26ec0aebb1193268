"""Use a draft through `pipeline("text-generation")`, for one text and for a batch.

    python examples/pipeline.py

Runs offline on the bundled pair of models, left as small as it is: `quickstart.py` shows speed.
"""

from transformers import pipeline

import hf_specdec
from hf_specdec import RoundRecord, SpeculativeConfig
from hf_specdec.demo import DEMO_PROMPTS, load_demo_pair


def main() -> None:
    """Print what a pipeline returns, and what the draft contributed."""
    pair = load_demo_pair(num_parameters=0)
    hf_specdec.enable(pair.target)

    # A pipeline hands on what it does not know to `generate`. It returns text alone, without the statistics, so the
    # rounds are collected as they happen.
    rounds: list[RoundRecord] = []
    writer = pipeline(
        "text-generation",
        model=pair.target,
        tokenizer=pair.tokenizer,
        max_new_tokens=48,
        do_sample=False,
        return_full_text=False,
        draft_model=pair.draft,
        speculative_config=SpeculativeConfig(num_draft_tokens=5, on_round=rounds.append),
    )

    print(f"---- one text\n{writer(DEMO_PROMPTS['prose'][0])[0]['generated_text']}\n")

    # What a call is given counts for that call, over what the pipeline was made with. A config replaces the whole one.
    prompts = DEMO_PROMPTS["json"][:2]
    config = SpeculativeConfig(num_draft_tokens=3, on_round=rounds.append)
    for row, result in enumerate(writer(prompts, batch_size=2, speculative_config=config)):
        print(f"---- row {row} of a batch\n{result[0]['generated_text']}\n")

    num_tokens = sum(record.num_committed_tokens for record in rounds)
    num_from_draft = sum(record.num_committed_draft_tokens for record in rounds)
    print(f"{num_from_draft} of {num_tokens} tokens came from the draft, in {len(rounds)} rounds")
    print("(a text's first token, from the target's pass over the prompt, belongs to no round)")


if __name__ == "__main__":
    main()
