"""Generate greedily and by sampling with a draft, and read what it did.

    python examples/quickstart.py

Runs offline on the bundled pair of models. The target is widened so that it costs as much as one of 300 million
parameters; `--num-parameters 0` leaves it small, which is quick, but then no draft can pay.
"""

import argparse

import torch

import hf_specdec
from hf_specdec.demo import DEMO_PROMPTS, load_demo_pair


def main() -> None:
    """Print two continuations of one prompt, each with its statistics."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-parameters", type=int, default=300_000_000, help="added to the target (0: none)")
    arguments = parser.parse_args()

    # With models of your own: two calls of AutoModelForCausalLM.from_pretrained, and the target's tokenizer.
    pair = load_demo_pair(num_parameters=arguments.num_parameters)
    model, draft, tokenizer = pair.target, pair.draft, pair.tokenizer
    hf_specdec.enable(model)

    inputs = tokenizer(DEMO_PROMPTS["code"][1], return_tensors="pt").to(model.device)
    prompt_length = inputs["input_ids"].shape[1]

    print("---- greedy")
    greedy = model.generate(
        **inputs, max_new_tokens=48, do_sample=False, draft_model=draft, return_dict_in_generate=True
    )
    print(tokenizer.decode(greedy.sequences[0, prompt_length:], skip_special_tokens=True))
    print(f"\n{greedy.speculation}")
    plain = model.generate(**inputs, max_new_tokens=48, do_sample=False)
    print(f"the same tokens as without the draft: {torch.equal(greedy.sequences, plain)}")

    print("\n---- sampled")
    # The draft length adapts to measured times by default. A number makes a seed give the same text every time.
    torch.manual_seed(0)
    sampled = model.generate(
        **inputs,
        max_new_tokens=48,
        do_sample=True,
        temperature=0.8,
        top_p=0.95,
        draft_model=draft,
        num_draft_tokens=4,
        return_dict_in_generate=True,
    )
    print(tokenizer.decode(sampled.sequences[0, prompt_length:], skip_special_tokens=True))
    print(f"\n{sampled.speculation}")


if __name__ == "__main__":
    main()
