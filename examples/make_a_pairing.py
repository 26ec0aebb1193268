"""Measure a pair, write it as a pairing, and generate with it: offline, with the pair that comes with the package.

The models can be any others: `python examples/make_a_pairing.py TARGET DRAFT`, by Hub id or local folder. What is
written to the folder is what `hf-specdec pair push FOLDER organisation/name` publishes.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_specdec
from hf_specdec.cli import app
from hf_specdec.demo import DEMO_FOLDER

PROMPTS = ["import os\n\ndef find_files(path):", "class Stack:\n    def push(self, item):"]


def main(target_name: str, draft_name: str, folder: Path) -> None:
    """Make a pairing in `folder`, and decode with it."""
    prompts = folder.with_name("prompts.jsonl")
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS), encoding="utf-8")
    # On the command line: hf-specdec pair create --model … --draft … --output … --prompts …
    options = {"--model": target_name, "--draft": draft_name, "--output": str(folder), "--prompts": str(prompts)}
    options |= {"--max-new-tokens": "24", "--repeats": "1", "--draft-quantization": "none"}
    app(["pair", "create", *(part for option in options.items() for part in option)], standalone_mode=False)

    pairing = hf_specdec.DraftPairing.from_pretrained(folder)
    print(f"{len(pairing.measurements)} measurements; draft: {pairing.draft}")

    tokenizer = AutoTokenizer.from_pretrained(target_name)
    model: Any = hf_specdec.enable(AutoModelForCausalLM.from_pretrained(target_name))
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        output = model.generate(
            **inputs, max_new_tokens=24, do_sample=False, draft_model=pairing, return_dict_in_generate=True
        )
        print(tokenizer.decode(output.sequences[0]))
        print(output.speculation)


if __name__ == "__main__":
    names = sys.argv[1:3] if len(sys.argv) > 2 else [str(DEMO_FOLDER / "target"), str(DEMO_FOLDER / "draft")]
    with tempfile.TemporaryDirectory() as parent:
        main(names[0], names[1], Path(parent) / "pairing")
